#include "stager.h"

#include <unistd.h>

#include <algorithm>

namespace badam {
namespace {

bool overlap(const std::byte* a, const std::byte* b, size_t a_bytes, size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

Stager::Stager(std::unique_ptr<Copier> copier, size_t chunk_bytes, bool direct)
    : process_(getpid()), copier_(std::move(copier)), chunk_bytes_(chunk_bytes) {
    if (!chunk_bytes) throw std::invalid_argument("chunk_bytes must be positive");
    // Without a ring the driver takes the pageable memory itself: slower, and the caller waits, but right.
    if (!direct) ring_ = copier_->ring(2 * slots_per_lane * chunk_bytes);
    if (!ring_) return;
    for (size_t i = 0; i < 2 * slots_per_lane; ++i)
        (i % 2 ? in_slots_ : out_slots_).push_back({ring_.get() + i * chunk_bytes, {}});
}

void Stager::flush(const std::vector<Piece>& pieces, Stream compute) {
    check_process();
    const std::lock_guard lock(mutex_);
    for (const Piece& chunk : cut(pieces)) unsent_.push_back(chunk);
    compute_ = compute;
    send();
    forget_done();
}

Event Stager::prefetch(const std::vector<Piece>& pieces, Stream compute) {
    check_process();
    const std::lock_guard lock(mutex_);
    send();
    Event arrival;
    attempt([&] {
        const Event computed = copier_->record_compute(compute);
        copier_->wait(Lane::in, computed);  // edge: what computed in the room before is done
        for (const Piece& chunk : cut(pieces)) enter(chunk);
        arrival = copier_->record(Lane::in);
    });
    return arrival;
}

void Stager::acquire(const Event& arrival, Stream compute) {
    check_process();
    const std::lock_guard lock(mutex_);
    send();
    forget_done();
    copier_->wait_compute(compute, arrival);  // edge: the slots have arrived
}

void Stager::settle() {
    check_process();
    const std::lock_guard lock(mutex_);
    send();
    if (!leaving_.empty()) copier_->synchronize(leaving_.back().host_ready);  // edge: the host reads what has arrived
    leaving_.clear();
}

bool Stager::settled() {
    check_process();
    const std::lock_guard lock(mutex_);
    forget_done();
    return unsent_.empty() && leaving_.empty();
}

void Stager::synchronize() {
    check_process();
    const std::lock_guard lock(mutex_);
    unsent_.clear();
    drain();  // edge: host memory is nobody's but the caller's
}

void Stager::check_process() const {
    if (getpid() != process_) throw std::runtime_error("a store that moves slots works only in the process that made it");
}

// Chunks of at most chunk_bytes, in order.
std::vector<Piece> Stager::cut(const std::vector<Piece>& pieces) const {
    std::vector<Piece> chunks;
    for (const Piece& piece : pieces)
        for (size_t done = 0; done < piece.bytes; done += chunk_bytes_)
            chunks.push_back({piece.room + done, piece.host + done, std::min(chunk_bytes_, piece.bytes - done)});
    return chunks;
}

void Stager::drain() {
    for (const Lane lane : {Lane::in_host, Lane::in, Lane::out, Lane::out_host}) copier_->synchronize(copier_->record(lane));
    leaving_.clear();
}

void Stager::attempt(const std::function<void()>& work) {
    if (interrupted_) drain();
    interrupted_ = true;
    work();
    interrupted_ = false;
}

void Stager::send() {
    if (unsent_.empty()) return;
    attempt([&] {
        const Event computed = copier_->record_compute(compute_);
        copier_->wait(Lane::out, computed);  // edge: the step has written the slots
        for (; !unsent_.empty(); unsent_.pop_front()) leave(unsent_.front());
    });
}

void Stager::leave(const Piece& chunk) {
    if (!ring_) {
        copier_->copy(Lane::out, chunk.host, chunk.room, chunk.bytes);
        const Event done = copier_->record(Lane::out);
        leaving_.push_back({chunk, done, done});
        return;
    }
    Slot& slot = next_slot(out_slots_, next_out_);
    copier_->wait(Lane::out, slot.free);  // edge: the slot's last chunk is in host memory
    copier_->copy(Lane::out, slot.data, chunk.room, chunk.bytes);
    const Event room_free = copier_->record(Lane::out);
    copier_->wait(Lane::out_host, room_free);  // edge: the chunk is in the slot
    copier_->copy(Lane::out_host, chunk.host, slot.data, chunk.bytes);
    slot.free = copier_->record(Lane::out_host);
    leaving_.push_back({chunk, room_free, slot.free});
}

void Stager::enter(const Piece& chunk) {
    // Chunks leave in order: once the last one in the way has, all have.
    Event room_free, host_ready;
    for (const Leaving& other : leaving_) {
        if (overlap(chunk.room, other.chunk.room, chunk.bytes, other.chunk.bytes)) room_free = other.room_free;
        if (overlap(chunk.host, other.chunk.host, chunk.bytes, other.chunk.bytes)) host_ready = other.host_ready;
    }
    if (!ring_) {
        copier_->wait(Lane::in, host_ready);  // edge: the chunk's own last visit is in host memory
        copier_->wait(Lane::in, room_free);  // edge: what was in its part of the room has left
        copier_->copy(Lane::in, chunk.room, chunk.host, chunk.bytes);
        return;
    }
    Slot& slot = next_slot(in_slots_, next_in_);
    copier_->wait(Lane::in_host, slot.free);  // edge: the slot's last chunk is in the room
    copier_->wait(Lane::in_host, host_ready);  // edge: the chunk's own last visit is in host memory, by way of the ring
    copier_->copy(Lane::in_host, slot.data, chunk.host, chunk.bytes);
    const Event filled = copier_->record(Lane::in_host);
    copier_->wait(Lane::in, filled);  // edge: the slot holds the chunk
    copier_->wait(Lane::in, room_free);  // edge: what was in its part of the room has left, by way of the ring
    copier_->copy(Lane::in, chunk.room, slot.data, chunk.bytes);
    slot.free = copier_->record(Lane::in);
}

void Stager::forget_done() {
    while (!leaving_.empty() && copier_->done(leaving_.front().host_ready)) leaving_.pop_front();
}

Stager::Slot& Stager::next_slot(std::vector<Slot>& slots, size_t& next) { return slots[next++ % slots.size()]; }

}  // namespace badam
