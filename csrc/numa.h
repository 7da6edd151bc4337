// On which memory node of the machine pages come to lie. All of it is a wish: where the system has no nodes, does not say, or
// refuses, as it may in a container, nothing happens.
#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace badam {

// A bit for each node that any kernel knows.
using NodeMask = std::array<unsigned long, 1024 / (8 * sizeof(unsigned long))>;

// The node next to a PCI device, as the system's files under `root` say; -1: they do not.
int node_of(std::string pci_bus_id, const std::string& root = "/sys");

// Pages of this range that nobody has touched yet come from `node` as long as it has any left.
void prefer_node(std::byte* data, size_t bytes, int node);

// While in scope, pages that are made for this thread come from `node` as long as it has any left.
class NodePreference {
public:
    explicit NodePreference(int node);
    ~NodePreference();
    NodePreference(const NodePreference&) = delete;
    NodePreference& operator=(const NodePreference&) = delete;

private:
    int mode_before_ = 0;
    NodeMask nodes_before_{};
    bool changed_ = false;
};

}  // namespace badam
