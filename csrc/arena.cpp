#include "arena.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "numa.h"
#include "threads.h"

namespace badam {
namespace {

constexpr size_t huge_page = 2 << 20;

size_t page() {
    static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Zeros, written by all cores, so that the pages come at the speed of all.
void fault_in(std::byte* data, size_t bytes) {
    const int64_t shares = static_cast<int64_t>((bytes + huge_page - 1) / huge_page);
    parallel_for(static_cast<int>(std::max(1u, std::thread::hardware_concurrency())), shares, [=](int64_t share) {
        const size_t begin = share * huge_page;
        std::memset(data + begin, 0, std::min(huge_page, bytes - begin));
    });
}

}  // namespace

Slab::Slab(size_t bytes, Pinning pinning, std::shared_ptr<const Context> context)
    : bytes_(bytes), pinning_(pinning), context_(std::move(context)) {
    if (!bytes) throw std::invalid_argument("a slab must have at least one byte");
    if (pinning != Pinning::none && !context_) throw std::invalid_argument("pinned memory needs a driver context");
    if (pinning == Pinning::none) {
        map();
        return;
    }
    const Context::Scope scope(*context_);
    const int node = node_of(context_->pci_bus_id());  // a copy from another one crosses the link between the processors
    if (pinning == Pinning::allocated) {
        // The driver makes the pages itself, for this thread: what the thread prefers is all that it can be told.
        const NodePreference preference(node);
        void* data = nullptr;
        context_->driver->cuMemHostAlloc(&data, reserved(), host_memory_portable);
        data_ = static_cast<std::byte*>(data);
        fault_in(data_, bytes);
        return;
    }
    map();
    try {
        prefer_node(data_, reserved(), node);
        fault_in(data_, reserved());
        // A fork would copy every pinned page at once, or make this process lose the pages that the device writes to.
        madvise(data_, reserved(), MADV_DONTFORK);
        context_->driver->cuMemHostRegister(data_, reserved(), host_memory_portable);
    } catch (...) {
        unmap();
        throw;
    }
}

Slab::~Slab() {
    if (pinning_ == Pinning::none) {
        unmap();
        return;
    }
    if (!context_->driver->usable()) return;  // a forked child: the parent's pinned memory is not mapped here
    const Context::Scope scope(*context_, std::nothrow);
    if (pinning_ == Pinning::allocated)
        context_->driver->cuMemFreeHost.code(data_);
    else
        context_->driver->cuMemHostUnregister.code(data_);
    if (pinning_ == Pinning::registered) unmap();
}

size_t Slab::reserved() const { return round_up(bytes_, page()); }

size_t Slab::touched() const {
    constexpr size_t pages_at_once = 1 << 18;
    const size_t pages = reserved() / page();
    std::vector<unsigned char> present(std::min(pages, pages_at_once));
    size_t found = 0;
    for (size_t first = 0; first < pages; first += pages_at_once) {
        const size_t count = std::min(pages_at_once, pages - first);
        if (mincore(data_ + first * page(), count * page(), present.data())) return reserved();
        found += std::count_if(present.begin(), present.begin() + count, [](unsigned char flags) { return flags & 1; });
    }
    return found * page();
}

void Slab::map() {
    // Huge pages need addresses that are multiples of theirs: map more addresses, and give the ends back.
    const size_t slack = reserved() >= huge_page ? huge_page : 0;
    void* const mapped = mmap(nullptr, reserved() + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        throw OutOfMemory("the system refused " + std::to_string(reserved()) + " bytes of host memory: " + std::strerror(errno));
    std::byte* const begin = static_cast<std::byte*>(mapped);
    data_ = slack ? reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(begin), huge_page)) : begin;
    const size_t head = data_ - begin;
    if (head) munmap(begin, head);
    if (slack > head) munmap(data_ + reserved(), slack - head);
    madvise(data_, reserved(), MADV_HUGEPAGE);  // advice: a kernel without huge pages may refuse it
}

void Slab::unmap() { munmap(data_, reserved()); }

}  // namespace badam
