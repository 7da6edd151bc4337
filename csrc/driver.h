// The few entry points of the CUDA driver that the store needs, found at run time: nothing is linked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include <sys/types.h>

namespace badam {

// A call that the driver refused: names the call, the code and its text.
class DriverError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

using DevicePtr = unsigned long long;
using HostFunction = void (*)(void*);
enum class CaptureMode : unsigned { global, thread_local_, relaxed };

// name, symbol, parameters: cuda.h's, with opaque handles as void*. driver_check.cpp compares them with a toolkit's header.
#define BADAM_DRIVER_CALLS(CALL)                                                       \
    CALL(cuInit, "cuInit", unsigned)                                                   \
    CALL(cuDeviceGet, "cuDeviceGet", int*, int)                                        \
    CALL(cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId", char*, int, int)                  \
    CALL(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", void**, int)            \
    CALL(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", int)               \
    CALL(cuCtxPushCurrent, "cuCtxPushCurrent_v2", void*)                               \
    CALL(cuCtxPopCurrent, "cuCtxPopCurrent_v2", void**)                                \
    CALL(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", CaptureMode*) \
    CALL(cuStreamCreate, "cuStreamCreate", void**, unsigned)                           \
    CALL(cuStreamDestroy, "cuStreamDestroy_v2", void*)                                 \
    CALL(cuStreamWaitEvent, "cuStreamWaitEvent", void*, void*, unsigned)               \
    CALL(cuStreamSynchronize, "cuStreamSynchronize", void*)                            \
    CALL(cuEventCreate, "cuEventCreate", void**, unsigned)                             \
    CALL(cuEventRecord, "cuEventRecord", void*, void*)                                 \
    CALL(cuEventQuery, "cuEventQuery", void*)                                          \
    CALL(cuEventSynchronize, "cuEventSynchronize", void*)                              \
    CALL(cuEventDestroy, "cuEventDestroy_v2", void*)                                   \
    CALL(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", DevicePtr, const void*, size_t, void*) \
    CALL(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", void*, DevicePtr, size_t, void*)   \
    CALL(cuLaunchHostFunc, "cuLaunchHostFunc", void*, HostFunction, void*)             \
    CALL(cuMemHostAlloc, "cuMemHostAlloc", void**, size_t, unsigned)                   \
    CALL(cuMemFreeHost, "cuMemFreeHost", void*)                                        \
    CALL(cuMemHostRegister, "cuMemHostRegister_v2", void*, size_t, unsigned)           \
    CALL(cuMemHostUnregister, "cuMemHostUnregister", void*)                            \
    CALL(cuGetErrorName, "cuGetErrorName", int, const char**)                          \
    CALL(cuGetErrorString, "cuGetErrorString", int, const char**)

constexpr int driver_not_ready = 600;
constexpr unsigned stream_non_blocking = 1, event_disable_timing = 2, host_memory_portable = 1;

// The driver library, initialised. Never unloaded. Useless in a forked child, like the library itself.
class Driver {
public:
    // Throws DriverError if the library, one of its entry points or a device is missing.
    explicit Driver(const std::string& path = "libcuda.so.1");

    // True in the process that made it; a forked child must make no calls.
    bool usable() const;

    // A driver function that throws DriverError for every code but 0.
    template <class... Args>
    class Call {
    public:
        void operator()(Args... args) const {
            const int code = function_(args...);
            if (code) owner_->fail(symbol_, code);
        }
        // The code, for those who must not throw or expect others than 0.
        int code(Args... args) const { return function_(args...); }
        void check(int code) const {
            if (code) owner_->fail(symbol_, code);
        }

    private:
        friend Driver;
        const Driver* owner_;
        const char* symbol_;
        int (*function_)(Args...);
    };

#define BADAM_CALL(name, symbol, ...) Call<__VA_ARGS__> name;
    BADAM_DRIVER_CALLS(BADAM_CALL)
#undef BADAM_CALL

private:
    [[noreturn]] void fail(const char* symbol, int code) const;

    pid_t process_;
};

// A device's primary context, the one that torch uses.
class Context {
public:
    Context(std::shared_ptr<const Driver> driver, int device);
    ~Context();
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    // The context is current on this thread while in scope. A CUDA graph that is being captured meanwhile, by torch on this or
    // another thread, is not disturbed: Python may drop a store at any moment, and what is done here is no part of that graph.
    class Scope {
    public:
        explicit Scope(const Context& context);
        // For those who give back: goes on without, if the context cannot be made current.
        Scope(const Context& context, std::nothrow_t);
        ~Scope();
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

    private:
        void exchange_capture_mode() { driver_.cuThreadExchangeStreamCaptureMode.code(&mode_); }

        const Driver& driver_;
        const bool pushed_;
        CaptureMode mode_ = CaptureMode::relaxed;
    };

    // Such as 0000:3B:00.0; empty if the driver does not say.
    std::string pci_bus_id() const;

    const std::shared_ptr<const Driver> driver;

private:
    int device_ = 0;
    void* handle_ = nullptr;
};

}  // namespace badam
