// Moves slots between host memory and the device memory that a block's slots share, a room.
//
// A block leaves (`flush`) while the next one enters (`prefetch`), chunk by chunk and in place: a chunk enters a part of the
// room as soon as what was there has left, so that both directions are in flight and no second copy of a block is on the
// device. There may be several rooms: what left one is in host memory before it enters another. Host memory that the device
// does not reach directly goes through a ring of memory that it does.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <sys/types.h>

#include "copier.h"

namespace badam {

// A range of a room and the range of host memory that belongs to it.
struct Piece {
    std::byte* room;
    std::byte* host;
    size_t bytes;
};

class Stager {
public:
    // `direct`: the device reaches the host memory of all pieces by itself.
    Stager(std::unique_ptr<Copier> copier, size_t chunk_bytes, bool direct);
    // Its end waits for everything in flight.

    // Copies `pieces` to the host once the work that `compute` has been given is done. Returns at once.
    // What could not be sent stays in the room and is sent again by the next call to any of these.
    void flush(const std::vector<Piece>& pieces, Stream compute);
    // Copies `pieces` to their room once it is free there. Returns at once, with what comes to pass when they, and all that
    // was prefetched before, have arrived. Their host memory must not change until then.
    Event prefetch(const std::vector<Piece>& pieces, Stream compute);
    // What `compute` is given from now on runs after `arrival`.
    void acquire(const Event& arrival, Stream compute);
    // Blocks until everything flushed is in host memory.
    void settle();
    // Whether everything flushed is in host memory.
    bool settled();
    // Blocks until nothing is in flight. What could not be sent is given up.
    void synchronize();

    size_t ring_bytes() const { return ring_ ? 2 * slots_per_lane * chunk_bytes_ : 0; }

    // All of these throw DriverError for a call that failed, now or earlier, and std::runtime_error in a forked child.

private:
    // A chunk on its way out.
    struct Leaving {
        Piece chunk;
        Event room_free, host_ready;
    };
    struct Slot {
        std::byte* data = nullptr;
        Event free;
    };
    static constexpr size_t slots_per_lane = 2;

    void check_process() const;
    std::vector<Piece> cut(const std::vector<Piece>& pieces) const;
    void drain();
    void attempt(const std::function<void()>& work);
    void send();
    void leave(const Piece& chunk);
    void enter(const Piece& chunk);
    void forget_done();
    Slot& next_slot(std::vector<Slot>& slots, size_t& next);

    const pid_t process_;
    std::shared_ptr<std::byte> ring_;  // outlives the copier, whose end waits for what is in flight
    const std::unique_ptr<Copier> copier_;
    const size_t chunk_bytes_;
    std::vector<Slot> out_slots_, in_slots_;
    size_t next_out_ = 0, next_in_ = 0;

    std::mutex mutex_;
    std::deque<Piece> unsent_;  // chunks still only in the room
    Stream compute_ = 0;        // the stream that wrote them
    bool interrupted_ = false;  // a call failed half-way: lanes must be empty before another try
    std::deque<Leaving> leaving_;
};

}  // namespace badam
