// Random switches of a small model's slots, by the real arena, driver, copiers and stager, against a plain account of what
// every byte must be. Blocks share tensors, and are brought ahead to one to three rooms. On streams it runs over
// python_tests/standin_driver; the computing stream is never waited for, so that only the stager's own order keeps bytes right.
//
//     store_stress LIBRARY|threads pinned|registered|ring|unpinned FIRST_SEED SEEDS DELAY_US
//
// Exits with 1 at the first wrong byte.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "../arena.h"
#include "../stager.h"

using namespace badam;

namespace {

using Bytes = std::vector<uint8_t>;

struct StandIn {
    void (*reset)(uint64_t, int, size_t);
    void (*counts)(long*);
    void* (*stream)();
    void (*drop_stream)(void*);
    void (*finish)(void*);
    void (*add)(void*, uint8_t*, size_t, int);
    void (*observe)(void*, uint8_t*, const uint8_t*, size_t);

    explicit StandIn(const std::string& path) {
        void* const library = dlopen(path.c_str(), RTLD_NOW);
        if (!library) throw std::runtime_error(dlerror());
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
        };
        find(reset, "standin_reset"), find(counts, "standin_counts"), find(stream, "standin_stream");
        find(drop_stream, "standin_drop_stream"), find(finish, "standin_finish"), find(add, "standin_add");
        find(observe, "standin_observe");
    }
};

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

void expect_equal(const uint8_t* got, const Bytes& expected, const std::string& where) {
    for (size_t i = 0; i < expected.size(); ++i)
        if (got[i] != expected[i])
            fail(where + ": byte " + std::to_string(i) + " of " + std::to_string(expected.size()) + " is " +
                 std::to_string(got[i]) + ", expected " + std::to_string(expected[i]));
}

struct Tensor {
    size_t offset;   // in the slab
    Bytes expected;  // what it must hold, wherever it is
};

struct Room {
    std::vector<std::byte> memory;
    std::vector<size_t> tensors;  // that are laid out in it
    std::vector<Piece> pieces;    // one for each
    std::set<size_t> absent;      // of those, what it has no bytes of, or old ones
    Event arrival;                // of the others
};

struct Seen {
    Bytes got, expected;
};

class Run {
public:
    Run(uint64_t seed, const StandIn* standin, std::shared_ptr<const Context> context, const std::string& mode)
        : random_(seed), standin_(standin) {
        size_t total = 0;
        const size_t num_tensors = 4 + draw(8);
        for (size_t i = 0; i < num_tensors; ++i) {
            const size_t bytes = draw(3) ? 1 + draw(3000) : 1 + draw(40000);
            tensors_.push_back({total, Bytes(bytes)});
            total += (bytes + 63) / 64 * 64;
        }
        for (size_t i = 0; i < 2 + draw(4); ++i) {
            std::vector<size_t> block;
            for (size_t t = 0; t < num_tensors; ++t)
                if (draw(3) == 0 || t == 0) block.push_back(t);  // tensor 0 is in every block
            blocks_.push_back(block);
        }
        const Pinning pinning = mode == "pinned"       ? Pinning::allocated
                                : mode == "registered" ? Pinning::registered
                                                       : Pinning::none;
        slab_ = std::make_unique<Slab>(total, pinning, pinning == Pinning::none ? nullptr : context);
        rooms_.resize(1 + draw(3));
        for (Room& room : rooms_) room.memory.resize(total + 64, std::byte{0xEE});
        auto copier = context ? driver_copier(context) : thread_copier();
        stager_ = std::make_unique<Stager>(std::move(copier), 1000 + draw(4000), pinning != Pinning::none);
        if (standin_) compute_ = standin_->stream();
        for (const Tensor& tensor : tensors_) expect_equal(host(tensor), tensor.expected, "a new slab");
    }

    ~Run() {
        stager_.reset();
        if (standin_) standin_->drop_stream(compute_);
    }

    void go() {
        for (int round = 0; round < 25; ++round) visit();
        stager_->settle();
        for (const Tensor& tensor : tensors_) expect_equal(host(tensor), tensor.expected, "host memory at the end");
        if (standin_) standin_->finish(compute_);
        for (const Seen& seen : seen_) expect_equal(seen.got.data(), seen.expected, "a fetched slot");
    }

private:
    void visit() {
        const size_t block = next_;
        next_ = draw(blocks_.size());
        bring(block, true);
        if (rooms_.size() > 1 && draw(4)) bring(draw(8) ? next_ : draw(blocks_.size()), true);
        if (draw(4) == 0) return;  // another block is fetched instead
        if (draw(4) == 0) read_idle(block);
        Room& room = bring(block, false);
        stager_->acquire(room.arrival, stream());
        for (size_t i = 0; i < room.pieces.size(); ++i) compute(tensors_[room.tensors[i]], room.pieces[i].room);
        if (draw(6) == 0) return drop();
        stager_->flush(room.pieces, stream());
        for (Room& other : rooms_)
            for (const size_t t : room.tensors) other.absent.insert(t);
        room.tensors.clear();
        if (draw(6) == 0) read_idle(blocks_.size());
    }

    // Starts to move `block` to a room; if that is ahead of its visit, without what other rooms have.
    Room& bring(size_t block, bool ahead) {
        const auto rank = [&](const Room& room) { return 2 * (room.tensors != blocks_[block]) + !room.tensors.empty(); };
        const auto before = [&](const Room& a, const Room& b) { return rank(a) < rank(b); };
        const auto found = std::min_element(rooms_.begin(), rooms_.end(), before);
        rooms_.splice(rooms_.end(), rooms_, found);  // that asked for longest ago is the first
        Room& room = *found;
        if (room.tensors != blocks_[block]) lay_out(room, blocks_[block]);
        std::vector<Piece> pieces;
        for (size_t i = 0; i < room.pieces.size(); ++i) {
            const size_t t = room.tensors[i];
            if (!room.absent.count(t) || (ahead && elsewhere(room, t))) continue;
            pieces.push_back(room.pieces[i]);
            room.absent.erase(t);
        }
        if (!pieces.empty()) room.arrival = stager_->prefetch(pieces, stream());
        return room;
    }

    void lay_out(Room& room, const std::vector<size_t>& tensors) {
        room.tensors = tensors;
        room.absent = {tensors.begin(), tensors.end()};
        room.pieces.clear();
        size_t at = 0;
        for (const size_t t : tensors) {
            const size_t bytes = (tensors_[t].expected.size() + 63) / 64 * 64;
            room.pieces.push_back({room.memory.data() + at, slab_->data() + tensors_[t].offset, bytes});
            at += bytes;
        }
    }

    bool elsewhere(const Room& room, size_t t) const {
        for (const Room& other : rooms_)
            for (const size_t held : other.tensors)
                if (&other != &room && held == t && !other.absent.count(t)) return true;
        return false;
    }

    // A step on a fetched slot: look at it, then change it.
    void compute(Tensor& tensor, std::byte* room) {
        auto* const data = reinterpret_cast<uint8_t*>(room);
        seen_.push_back({Bytes(tensor.expected.size()), tensor.expected});
        const int amount = 1 + static_cast<int>(draw(200));
        const size_t bytes = tensor.expected.size();
        if (standin_) {
            standin_->observe(compute_, seen_.back().got.data(), data, bytes);
            if (draw(5)) standin_->add(compute_, data, bytes, amount);
            else return;
        } else {
            std::memcpy(seen_.back().got.data(), data, bytes);
            for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(data[i] + amount);
        }
        for (uint8_t& byte : tensor.expected) byte = static_cast<uint8_t>(byte + amount);
    }

    void read_idle(size_t active) {
        stager_->settle();
        for (size_t t = 0; t < tensors_.size(); ++t) {
            bool idle = true;
            if (active < blocks_.size())
                for (const size_t other : blocks_[active]) idle = idle && other != t;
            if (idle) expect_equal(host(tensors_[t]), tensors_[t].expected, "an idle slot");
        }
    }

    // What was fetched is given up, and all slots get new values, while kernels may still write in the room.
    void drop() {
        stager_->synchronize();
        for (Room& room : rooms_) room.tensors.clear();
        for (Tensor& tensor : tensors_) {
            for (uint8_t& byte : tensor.expected) byte = static_cast<uint8_t>(draw(256));
            std::memcpy(host(tensor), tensor.expected.data(), tensor.expected.size());
        }
    }

    uint8_t* host(const Tensor& tensor) const { return reinterpret_cast<uint8_t*>(slab_->data() + tensor.offset); }
    Stream stream() const { return reinterpret_cast<Stream>(compute_); }
    size_t draw(size_t below) { return random_() % below; }

    std::mt19937_64 random_;
    const StandIn* standin_;
    std::vector<Tensor> tensors_;
    std::vector<std::vector<size_t>> blocks_;
    size_t next_ = 0;
    std::unique_ptr<Slab> slab_;
    std::list<Room> rooms_;
    std::unique_ptr<Stager> stager_;
    void* compute_ = nullptr;
    std::list<Seen> seen_;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 6) fail("usage: store_stress LIBRARY|threads pinned|registered|ring|unpinned FIRST_SEED SEEDS DELAY_US");
    const std::string library = argv[1], mode = argv[2];
    const uint64_t first = std::strtoull(argv[3], nullptr, 10), seeds = std::strtoull(argv[4], nullptr, 10);
    std::unique_ptr<StandIn> standin;
    std::shared_ptr<const Driver> driver;
    if (library != "threads") {
        standin = std::make_unique<StandIn>(library);
        driver = std::make_shared<const Driver>(library);
    }
    for (uint64_t seed = first; seed < first + seeds; ++seed) {
        if (standin) standin->reset(seed, std::atoi(argv[5]), mode == "unpinned" ? 1 : 0);
        {
            std::shared_ptr<const Context> context;
            if (standin) context = std::make_shared<const Context>(driver, 0);
            Run(seed, standin.get(), context, mode).go();
        }
        if (!standin) continue;
        long counts[8];
        standin->counts(counts);
        if (counts[1] && mode != "unpinned") fail("pageable memory was given to the device");
        for (int i = 2; i < 8; ++i)
            if (counts[i]) fail("the driver still has count " + std::to_string(i) + " = " + std::to_string(counts[i]));
    }
}
