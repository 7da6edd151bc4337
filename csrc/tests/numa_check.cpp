// What csrc/numa.h makes of a machine.
//
//     numa_check node ROOT PCI_BUS_ID   prints the node
//     numa_check policy                 prints the policies of pages and of this thread, each a mode and a set of nodes;
//                                       or "refused", where the system lets nobody set one
#include <cstdio>
#include <cstring>

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../numa.h"

using namespace badam;

namespace {

constexpr size_t size = 1 << 16, mask_bits = 8 * sizeof(NodeMask);

void print_policy(const char* of, std::byte* page) {
    int mode = -1;
    NodeMask nodes{};
    syscall(SYS_get_mempolicy, &mode, nodes.data(), mask_bits, page, page ? MPOL_F_ADDR : 0);
    std::printf("%s %d %lu\n", of, mode, nodes[0]);
}

int policy() {
    if (syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0)) return std::puts("refused");
    void* const pages = mmap(nullptr, 3 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    auto* const data = static_cast<std::byte*>(pages);
    prefer_node(data, size, -1);
    print_policy("untold", data);
    prefer_node(data + size, size, 0);
    std::memset(data, 1, 3 * size);
    print_policy("before", data);
    print_policy("first", data + size);
    print_policy("last", data + 2 * size - 1);
    print_policy("after", data + 2 * size);
    const NodeMask zero{1};
    syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, zero.data(), mask_bits);
    {
        const NodePreference none(-1);
        print_policy("untold", nullptr);
        const NodePreference preference(0);
        print_policy("inside", nullptr);
    }
    print_policy("outside", nullptr);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc == 4 && !std::strcmp(argv[1], "node")) return !std::printf("%d\n", node_of(argv[3], argv[2]));
    if (argc == 2 && !std::strcmp(argv[1], "policy")) return policy() && false;
    return 2;
}
