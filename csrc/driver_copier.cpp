#include <array>
#include <atomic>
#include <cstring>
#include <list>

#include "copier.h"

namespace badam {
namespace {

struct HostCopy {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
    std::atomic<bool> finished{false};

    static void run(void* self) {
        auto* const copy = static_cast<HostCopy*>(self);
        std::memcpy(copy->to, copy->from, copy->bytes);
        copy->finished.store(true, std::memory_order_release);
    }
};

class DriverCopier final : public Copier {
public:
    explicit DriverCopier(std::shared_ptr<const Context> context) : context_(std::move(context)), driver_(*context_->driver) {
        const Context::Scope scope(*context_);
        try {
            for (void*& stream : streams_) driver_.cuStreamCreate(&stream, stream_non_blocking);
        } catch (...) {
            destroy();
            throw;
        }
    }
    ~DriverCopier() override {
        if (!driver_.usable()) return;
        const Context::Scope scope(*context_, std::nothrow);
        for (void* stream : streams_) driver_.cuStreamSynchronize.code(stream);
        destroy();
    }

    void copy(Lane lane, std::byte* to, const std::byte* from, size_t bytes) override {
        const Context::Scope scope(*context_);
        switch (lane) {
            case Lane::out: return driver_.cuMemcpyDtoHAsync(to, reinterpret_cast<DevicePtr>(from), bytes, stream(lane));
            case Lane::in: return driver_.cuMemcpyHtoDAsync(reinterpret_cast<DevicePtr>(to), from, bytes, stream(lane));
            default: break;
        }
        host_copies_.remove_if([](const HostCopy& copy) { return copy.finished.load(std::memory_order_acquire); });
        HostCopy& given = host_copies_.emplace_back();
        given.to = to, given.from = from, given.bytes = bytes;
        const int code = driver_.cuLaunchHostFunc.code(stream(lane), &HostCopy::run, &given);
        if (code) host_copies_.pop_back();
        driver_.cuLaunchHostFunc.check(code);
    }
    Event record(Lane lane) override { return record_on(stream(lane)); }
    Event record_compute(Stream stream) override { return record_on(reinterpret_cast<void*>(stream)); }
    void wait(Lane lane, const Event& event) override { wait_on(stream(lane), event); }
    void wait_compute(Stream stream, const Event& event) override { wait_on(reinterpret_cast<void*>(stream), event); }

    bool done(const Event& event) override {
        if (!event) return true;
        const Context::Scope scope(*context_);
        const int code = driver_.cuEventQuery.code(event.get());
        if (code == driver_not_ready) return false;
        driver_.cuEventQuery.check(code);
        return true;
    }
    void synchronize(const Event& event) override {
        if (!event) return;
        const Context::Scope scope(*context_);
        driver_.cuEventSynchronize(event.get());
    }

    std::shared_ptr<std::byte> ring(size_t bytes) override {
        const Context::Scope scope(*context_);
        void* data = nullptr;
        if (driver_.cuMemHostAlloc.code(&data, bytes, host_memory_portable)) return {};
        return {static_cast<std::byte*>(data), [context = context_](std::byte* data) {
                    if (!context->driver->usable()) return;
                    const Context::Scope scope(*context, std::nothrow);
                    context->driver->cuMemFreeHost.code(data);
                }};
    }

private:
    void* stream(Lane lane) const { return streams_[static_cast<size_t>(lane)]; }

    Event record_on(void* stream) {
        const Context::Scope scope(*context_);
        void* handle = nullptr;
        driver_.cuEventCreate(&handle, event_disable_timing);
        Event event(handle, [context = context_](void* handle) {
            if (!context->driver->usable()) return;
            const Context::Scope scope(*context, std::nothrow);
            context->driver->cuEventDestroy.code(handle);
        });
        driver_.cuEventRecord(handle, stream);
        return event;
    }
    void wait_on(void* stream, const Event& event) {
        if (!event) return;
        const Context::Scope scope(*context_);
        driver_.cuStreamWaitEvent(stream, event.get(), 0);
    }

    void destroy() {
        for (void* stream : streams_)
            if (stream) driver_.cuStreamDestroy.code(stream);
    }

    const std::shared_ptr<const Context> context_;
    const Driver& driver_;
    std::array<void*, num_lanes> streams_{};
    std::list<HostCopy> host_copies_;  // given to a stream and perhaps not run yet
};

}  // namespace

std::unique_ptr<Copier> driver_copier(std::shared_ptr<const Context> context) {
    return std::make_unique<DriverCopier>(std::move(context));
}

}  // namespace badam
