// Host memory of exact size, in slabs: pinned by the driver where it can, pageable and lazily zero elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "driver.h"

namespace badam {

// Memory that the system would not give.
class OutOfMemory : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

enum class Pinning {
    none,        // private anonymous pages, touched by nobody: they cost nothing until written
    allocated,   // the driver's own allocation
    registered,  // ours, written by all cores and then registered with the driver
};

// Zeroed, page-aligned memory. Whoever holds the slab holds the memory.
class Slab {
public:
    // `context` is for pinned memory. Throws OutOfMemory or DriverError, and then keeps nothing.
    Slab(size_t bytes, Pinning pinning, std::shared_ptr<const Context> context);
    ~Slab();
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    std::byte* data() const { return data_; }
    size_t size() const { return bytes_; }
    // `size` rounded up to whole pages: what the system sets aside.
    size_t reserved() const;
    // Bytes that are in physical memory now.
    size_t touched() const;

private:
    void map();
    void unmap();

    const size_t bytes_;
    const Pinning pinning_;
    const std::shared_ptr<const Context> context_;
    std::byte* data_ = nullptr;
};

}  // namespace badam
