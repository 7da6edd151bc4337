#include "numa.h"

#include <algorithm>
#include <cctype>
#include <fstream>

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

// The system calls themselves, without libnuma: two of them are no reason to depend on it.
namespace badam {
namespace {

constexpr size_t word_bits = 8 * sizeof(unsigned long), mask_bits = word_bits * NodeMask{}.size();

NodeMask only(int node) {
    NodeMask mask{};
    mask.at(node / word_bits) = 1ul << node % word_bits;
    return mask;
}

}  // namespace

int node_of(std::string pci_bus_id, const std::string& root) {
    std::transform(pci_bus_id.begin(), pci_bus_id.end(), pci_bus_id.begin(), [](unsigned char c) { return std::tolower(c); });
    std::ifstream file(root + "/bus/pci/devices/" + pci_bus_id + "/numa_node");
    int node = -1;
    return file >> node && node < static_cast<int>(mask_bits) ? node : -1;
}

void prefer_node(std::byte* data, size_t bytes, int node) {
    if (node < 0) return;
    const NodeMask mask = only(node);
    syscall(SYS_mbind, data, bytes, MPOL_PREFERRED, mask.data(), mask_bits, 0);
}

NodePreference::NodePreference(int node) {
    if (node < 0 || syscall(SYS_get_mempolicy, &mode_before_, nodes_before_.data(), mask_bits, nullptr, 0)) return;
    const NodeMask mask = only(node);
    changed_ = syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask.data(), mask_bits) == 0;
}

NodePreference::~NodePreference() {
    if (changed_) syscall(SYS_set_mempolicy, mode_before_, nodes_before_.data(), mask_bits);
}

}  // namespace badam
