// A stand-in for libcuda.so.1 on a machine without a GPU. Device memory is host memory; a stream is a thread.
//
// It promises no more than CUDA does: work in a stream runs in order, events order streams, and nothing else does. Streams
// are delayed at random, a copy is split and its parts done in any order. An asynchronous copy of pageable memory is counted.
// Any call can be made to fail, and a copy to fail while it runs, which loses the device: nothing runs there any more and
// every call says so.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Code {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    invalid_device = 101,
    invalid_context = 201,
    lost = 214,
    invalid_handle = 400,
    not_ready = 600,
    capture_unsupported = 900,
};

struct Mark {
    std::mutex mutex;
    std::condition_variable changed;
    bool passed = false;

    void pass() {
        const std::lock_guard lock(mutex);
        passed = true;
        changed.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return passed; });
    }
};

struct Event {
    std::shared_ptr<Mark> mark;  // of the last record; none before the first
};

struct World {
    std::mutex mutex;
    std::mt19937_64 random{0};
    int longest_delay_us = 0;
    std::string failing_call;  // empty: any
    long calls_until_failure = -1, copies_until_loss = -1;
    int failure = out_of_memory;
    bool initialized = false, is_lost = false, capturing = false;
    long calls = 0, pageable_copies = 0, contexts = 0, depth_errors = 0, broken_captures = 0;
    std::map<uintptr_t, size_t> allocated, registered;
    size_t pinned_limit = SIZE_MAX;
    std::set<void*> events, streams;

    uint64_t draw(uint64_t below) {
        const std::lock_guard lock(mutex);
        return below ? random() % below : 0;
    }
    bool gone() {
        const std::lock_guard lock(mutex);
        return is_lost;
    }
    bool pinned(const void* data, size_t bytes) {
        const std::lock_guard lock(mutex);
        const auto at = reinterpret_cast<uintptr_t>(data);
        for (const auto* blocks : {&allocated, &registered}) {
            const auto after = blocks->upper_bound(at);
            if (after == blocks->begin()) continue;
            const auto [begin, size] = *std::prev(after);
            if (at + bytes <= begin + size) return true;
        }
        return false;
    }
    size_t pinned_bytes() const {
        size_t bytes = 0;
        for (const auto* blocks : {&allocated, &registered})
            for (const auto& [begin, size] : *blocks) bytes += size;
        return bytes;
    }
};

World& world() {
    static World* const one = new World;
    return *one;
}

thread_local int context_depth = 0;
thread_local unsigned capture_mode = 0;  // 2: this thread's calls do not disturb a graph that is being captured

// What a call that waits, or that makes or frees memory, returns before it does anything: a capture does not survive it.
int disturb() {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    if (!w.capturing || capture_mode == 2) return success;
    ++w.broken_captures;
    return capture_unsupported;
}

// What a call returns before it does anything.
int enter(const char* name, bool needs_context = true) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    ++w.calls;
    if (!w.initialized && std::strcmp(name, "cuInit")) return not_initialized;
    if (w.is_lost) return lost;
    if (needs_context && !context_depth) {
        ++w.depth_errors;
        return invalid_context;
    }
    const bool counts = w.calls_until_failure >= 0 && (w.failing_call.empty() || w.failing_call == name);
    return counts && w.calls_until_failure-- == 0 ? w.failure : success;
}

class Stream {
public:
    explicit Stream() : slowness_(world().draw(4)), thread_([this] { run(); }) {}
    ~Stream() {
        push({});
        thread_.join();
    }
    void push(std::function<void()> task) {
        {
            const std::lock_guard lock(mutex_);
            tasks_.push_back(std::move(task));
        }
        given_.notify_one();
    }
    // Work that a lost device does not do.
    void work(std::function<void()> task) {
        push([this, task = std::move(task)] {
            delay();
            if (!world().gone()) task();
        });
    }

private:
    void delay() {
        World& w = world();
        int longest;
        {
            const std::lock_guard lock(w.mutex);
            longest = w.longest_delay_us;
        }
        if (longest) std::this_thread::sleep_for(std::chrono::microseconds(slowness_ * w.draw(longest) / 3));
    }
    void run() {
        for (;;) {
            std::unique_lock lock(mutex_);
            given_.wait(lock, [this] { return !tasks_.empty(); });
            const auto task = std::move(tasks_.front());
            tasks_.pop_front();
            lock.unlock();
            if (!task) return;
            task();
        }
    }

    std::mutex mutex_;
    std::condition_variable given_;
    std::deque<std::function<void()>> tasks_;
    const uint64_t slowness_;
    std::thread thread_;
};

Stream* of(void* handle) { return static_cast<Stream*>(handle); }

bool known(void* stream) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    return w.streams.count(stream);
}

void copy_now(std::byte* to, const std::byte* from, size_t bytes) {
    World& w = world();
    {
        const std::lock_guard lock(w.mutex);
        if (w.copies_until_loss >= 0 && w.copies_until_loss-- == 0) {
            w.is_lost = true;
            bytes /= 2;
        }
    }
    const size_t parts = std::min<size_t>(bytes, 1 + w.draw(4));
    std::vector<size_t> order(parts);
    for (size_t i = 0; i < parts; ++i) order[i] = i;
    for (size_t i = parts; i > 1; --i) std::swap(order[i - 1], order[w.draw(i)]);
    for (const size_t part : order) {
        const size_t begin = bytes * part / parts, end = bytes * (part + 1) / parts;
        std::memcpy(to + begin, from + begin, end - begin);
        std::this_thread::yield();
    }
}

int copy_async(const char* name, std::byte* to, const std::byte* from, const void* host, size_t bytes, void* stream) {
    if (const int code = enter(name)) return code;
    if (!known(stream)) return invalid_handle;
    if (!bytes) return invalid_value;
    if (!world().pinned(host, bytes)) {
        // As CUDA may: the caller waits.
        const std::shared_ptr<Mark> mark = std::make_shared<Mark>();
        of(stream)->work([=] { copy_now(to, from, bytes); });
        of(stream)->push([mark] { mark->pass(); });
        mark->wait();
        const std::lock_guard lock(world().mutex);
        ++world().pageable_copies;
        return world().is_lost ? lost : success;
    }
    of(stream)->work([=] { copy_now(to, from, bytes); });
    return success;
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
    const int code = enter("cuInit", false);
    if (!code) world().initialized = true;
    return code;
}
int cuDeviceGet(int* device, int ordinal) {
    if (const int code = enter("cuDeviceGet", false)) return code;
    if (ordinal != 0) return invalid_device;
    *device = 40;
    return success;
}
int cuDeviceGetPCIBusId(char* id, int bytes, int device) {
    if (const int code = enter("cuDeviceGetPCIBusId", false)) return code;
    if (device != 40) return invalid_device;
    std::snprintf(id, bytes, "0000:3B:00.0");
    return success;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    if (const int code = enter("cuDevicePrimaryCtxRetain", false)) return code;
    if (device != 40) return invalid_value;
    const std::lock_guard lock(world().mutex);
    ++world().contexts;
    *context = &world();
    return success;
}
int cuDevicePrimaryCtxRelease_v2(int) {
    const std::lock_guard lock(world().mutex);
    --world().contexts;
    return success;
}
int cuCtxPushCurrent_v2(void*) {
    if (const int code = enter("cuCtxPushCurrent", false)) return code;
    ++context_depth;
    return success;
}
int cuCtxPopCurrent_v2(void** context) {
    *context = nullptr;
    --context_depth;
    return success;
}

int cuThreadExchangeStreamCaptureMode(unsigned* mode) {
    std::swap(*mode, capture_mode);
    return success;
}

int cuStreamCreate(void** stream, unsigned) {
    if (const int code = enter("cuStreamCreate")) return code;
    *stream = new Stream;
    const std::lock_guard lock(world().mutex);
    world().streams.insert(*stream);
    return success;
}
int cuStreamDestroy_v2(void* stream) {
    {
        const std::lock_guard lock(world().mutex);
        if (!world().streams.erase(stream)) return invalid_handle;
    }
    delete of(stream);
    return success;
}
int cuStreamSynchronize(void* stream) {
    if (const int code = enter("cuStreamSynchronize")) return code;
    if (const int code = disturb()) return code;
    if (!known(stream)) return invalid_handle;
    const std::shared_ptr<Mark> mark = std::make_shared<Mark>();
    of(stream)->push([mark] { mark->pass(); });
    mark->wait();
    return world().gone() ? lost : success;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    if (const int code = enter("cuStreamWaitEvent")) return code;
    if (!known(stream)) return invalid_handle;
    const std::lock_guard lock(world().mutex);
    if (!world().events.count(event)) return invalid_handle;
    if (const auto mark = static_cast<Event*>(event)->mark) of(stream)->push([mark] { mark->wait(); });
    return success;
}

int cuEventCreate(void** event, unsigned) {
    if (const int code = enter("cuEventCreate")) return code;
    *event = new Event;
    const std::lock_guard lock(world().mutex);
    world().events.insert(*event);
    return success;
}
int cuEventRecord(void* event, void* stream) {
    if (const int code = enter("cuEventRecord")) return code;
    if (!known(stream)) return invalid_handle;
    const std::lock_guard lock(world().mutex);
    if (!world().events.count(event)) return invalid_handle;
    const auto mark = std::make_shared<Mark>();
    static_cast<Event*>(event)->mark = mark;
    of(stream)->push([mark] { mark->pass(); });
    return success;
}
int cuEventQuery(void* event) {
    if (const int code = enter("cuEventQuery")) return code;
    if (const int code = disturb()) return code;
    const std::lock_guard lock(world().mutex);
    if (!world().events.count(event)) return invalid_handle;
    const auto mark = static_cast<Event*>(event)->mark;
    if (!mark) return success;
    const std::lock_guard mark_lock(mark->mutex);
    return mark->passed ? success : not_ready;
}
int cuEventSynchronize(void* event) {
    if (const int code = enter("cuEventSynchronize")) return code;
    if (const int code = disturb()) return code;
    std::shared_ptr<Mark> mark;
    {
        const std::lock_guard lock(world().mutex);
        if (!world().events.count(event)) return invalid_handle;
        mark = static_cast<Event*>(event)->mark;
    }
    if (mark) mark->wait();
    return world().gone() ? lost : success;
}
int cuEventDestroy_v2(void* event) {
    const std::lock_guard lock(world().mutex);
    if (!world().events.erase(event)) return invalid_handle;
    delete static_cast<Event*>(event);
    return success;
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* stream) {
    auto* const device = reinterpret_cast<std::byte*>(to);
    return copy_async("cuMemcpyHtoDAsync", device, static_cast<const std::byte*>(from), from, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void* stream) {
    const auto* const device = reinterpret_cast<const std::byte*>(from);
    return copy_async("cuMemcpyDtoHAsync", static_cast<std::byte*>(to), device, to, bytes, stream);
}
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    if (const int code = enter("cuLaunchHostFunc")) return code;
    if (!known(stream)) return invalid_handle;
    of(stream)->work([=] { function(data); });
    return success;
}

int cuMemHostAlloc(void** data, size_t bytes, unsigned) {
    if (const int code = enter("cuMemHostAlloc")) return code;
    if (const int code = disturb()) return code;
    World& w = world();
    const std::lock_guard lock(w.mutex);
    if (w.pinned_bytes() + bytes > w.pinned_limit) return out_of_memory;
    *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    std::memset(*data, 0xA5, bytes);
    w.allocated[reinterpret_cast<uintptr_t>(*data)] = bytes;
    return success;
}
int cuMemFreeHost(void* data) {
    if (const int code = disturb()) return code;
    World& w = world();
    const std::lock_guard lock(w.mutex);
    if (!w.allocated.erase(reinterpret_cast<uintptr_t>(data))) return invalid_value;
    std::free(data);
    return success;
}
int cuMemHostRegister_v2(void* data, size_t bytes, unsigned) {
    if (const int code = enter("cuMemHostRegister")) return code;
    if (const int code = disturb()) return code;
    World& w = world();
    const std::lock_guard lock(w.mutex);
    if (!bytes) return invalid_value;
    if (w.pinned_bytes() + bytes > w.pinned_limit) return out_of_memory;
    w.registered[reinterpret_cast<uintptr_t>(data)] = bytes;
    return success;
}
int cuMemHostUnregister(void* data) {
    if (const int code = disturb()) return code;
    const std::lock_guard lock(world().mutex);
    return world().registered.erase(reinterpret_cast<uintptr_t>(data)) ? success : invalid_value;
}

int cuGetErrorName(int code, const char** name) {
    *name = code == out_of_memory ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == lost        ? "CUDA_ERROR_ECC_UNCORRECTABLE"
                                  : "CUDA_ERROR_STANDIN";
    return success;
}
int cuGetErrorString(int code, const char** text) {
    *text = code == out_of_memory ? "out of memory"
            : code == lost        ? "uncorrectable ECC error encountered"
                                  : "a stand-in's error";
    return success;
}

// --- what the tests ask of it ---------------------------------------------------------------------------------------

// Forgets every failure; streams made from now on are up to `longest_delay_us` late with each piece of work.
void standin_reset(uint64_t seed, int longest_delay_us, size_t pinned_limit) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    w.random.seed(seed);
    w.longest_delay_us = longest_delay_us;
    w.failing_call.clear();
    w.calls_until_failure = w.copies_until_loss = -1;
    w.is_lost = false;
    w.calls = w.pageable_copies = w.depth_errors = w.broken_captures = 0;
    w.pinned_limit = pinned_limit ? pinned_limit : SIZE_MAX;
}
// The call to `name` (empty: any) after `skipped` others returns `code` and does nothing.
void standin_fail(const char* name, long skipped, int code) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    w.failing_call = name;
    w.calls_until_failure = skipped;
    w.failure = code;
}
// How many such calls will still be skipped; -1 once one has failed, or if none shall.
long standin_until_failure() {
    const std::lock_guard lock(world().mutex);
    return world().calls_until_failure;
}
// The copy after `skipped` others is left half-done, and the device is lost.
void standin_lose(long skipped) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    w.copies_until_loss = skipped;
}
// A CUDA graph is being captured somewhere, in the mode that torch has by default.
void standin_capturing(int capturing) {
    const std::lock_guard lock(world().mutex);
    world().capturing = capturing;
}
// calls, pageable copies, calls without a context, calls that broke a capture; then what is alive: contexts, streams, events, pinned blocks.
void standin_counts(long* counts) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    const long all[] = {w.calls,
                        w.pageable_copies,
                        w.depth_errors,
                        w.broken_captures,
                        w.contexts,
                        static_cast<long>(w.streams.size()),
                        static_cast<long>(w.events.size()),
                        static_cast<long>(w.allocated.size() + w.registered.size())};
    std::copy(std::begin(all), std::end(all), counts);
}
void* standin_stream() {
    void* const stream = new Stream;
    const std::lock_guard lock(world().mutex);
    world().streams.insert(stream);
    return stream;
}
void standin_drop_stream(void* stream) { cuStreamDestroy_v2(stream); }
void standin_finish(void* stream) {
    const auto mark = std::make_shared<Mark>();
    of(stream)->push([mark] { mark->pass(); });
    mark->wait();
}
// A kernel: adds `amount` to each of `count` bytes.
void standin_add(void* stream, uint8_t* data, size_t count, int amount) {
    of(stream)->work([=] {
        for (size_t i = 0; i < count; ++i) data[i] = static_cast<uint8_t>(data[i] + amount);
    });
}
// A kernel: copies `count` bytes to where the host can look at them.
void standin_observe(void* stream, uint8_t* to, const uint8_t* from, size_t count) {
    of(stream)->work([=] { std::memcpy(to, from, count); });
}

// A kernel: calls `function`.
void standin_call(void* stream, void (*function)(void*)) {
    of(stream)->work([=] { function(nullptr); });
}

}  // extern "C"
