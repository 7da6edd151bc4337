// Queues of copies that run beside the caller, and the events that order them: on a device's streams, or on threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "driver.h"

namespace badam {

// What a lane had been given when the event was recorded. Empty: nothing to wait for.
using Event = std::shared_ptr<void>;

// Work in one lane runs in order; lanes run beside each other.
enum class Lane {
    out,       // device to host
    in,        // host to device
    out_host,  // within the host, after `out`
    in_host,   // within the host, before `in`
};
constexpr int num_lanes = 4;

// Handle of the stream that computes on the device.
using Stream = uintptr_t;

class Copier {
public:
    virtual ~Copier() = default;

    // All of these return at once.
    virtual void copy(Lane lane, std::byte* to, const std::byte* from, size_t bytes) = 0;
    virtual Event record(Lane lane) = 0;
    virtual void wait(Lane lane, const Event& event) = 0;

    virtual Event record_compute(Stream stream) = 0;
    // What is given to `stream` later runs after `event`.
    virtual void wait_compute(Stream stream, const Event& event) = 0;

    // Whether `event` has come to pass. Throws for a copy that failed.
    virtual bool done(const Event& event) = 0;
    // Blocks until `event` has come to pass. Throws for a copy that failed.
    virtual void synchronize(const Event& event) = 0;

    // Host memory that the device reaches directly, or empty: then any host memory will do.
    virtual std::shared_ptr<std::byte> ring(size_t bytes) = 0;
};

// Copies on two threads within the host. The caller itself is what computes.
std::unique_ptr<Copier> thread_copier();

// Copies on streams of a CUDA device.
std::unique_ptr<Copier> driver_copier(std::shared_ptr<const Context> context);

}  // namespace badam
