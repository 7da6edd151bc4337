#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace badam {
namespace {

uint64_t float_mode() {
#if defined(__x86_64__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
#else
    return 0;
#endif
}

void set_float_mode(uint64_t mode) {
#if defined(__x86_64__)
    _mm_setcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" : : "r"(mode));
#else
    (void)mode;
#endif
}

#if defined(__x86_64__)
constexpr uint64_t default_float_mode = 0x1F80;  // all exceptions masked, nothing else
#else
constexpr uint64_t default_float_mode = 0;
#endif

struct Job {
    const std::function<void(int64_t)>& task;
    const int64_t count;
    std::atomic<int64_t> next{0};

    void drain() {
        const DefaultFloatMode mode;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
    }
};

class Pool {
public:
    // False if another caller has the workers.
    bool run(int helpers, Job& job) {
        const std::unique_lock busy(busy_, std::try_to_lock);
        if (!busy) return false;
        {
            const std::lock_guard lock(mutex_);
            grow(helpers);
            job_ = &job;
            tickets_ = helpers;
        }
        wake_.notify_all();
        job.drain();
        std::unique_lock lock(mutex_);
        tickets_ = 0;  // a worker that has not woken by now has nothing left to do, and is not waited for
        done_.wait(lock, [this] { return running_ == 0; });
        return true;
    }

private:
    void grow(int wanted) {
        try {
            for (; size_ < wanted; ++size_) std::thread(&Pool::work, this).detach();
        } catch (const std::system_error&) {
            // The process may have no more threads. Those there are do the work.
        }
    }

    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return tickets_ > 0; });
            --tickets_;
            ++running_;
            Job* job = job_;
            lock.unlock();
            job->drain();
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    std::mutex busy_, mutex_;
    std::condition_variable wake_, done_;
    Job* job_ = nullptr;
    int size_ = 0, tickets_ = 0, running_ = 0;
};

// Never destroyed: at exit its workers may still be asleep in it. After a fork the child has none of the workers, and locks
// in whatever state they were; it starts afresh.
Pool* pool = [] {
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    return new Pool;
}();

}  // namespace

DefaultFloatMode::DefaultFloatMode() : saved_(float_mode()) { set_float_mode(default_float_mode); }
DefaultFloatMode::~DefaultFloatMode() { set_float_mode(saved_); }

void parallel_for(int threads, int64_t count, const std::function<void(int64_t)>& task) {
    Job job{task, count};
    const int helpers = static_cast<int>(threads < count ? threads : count) - 1;
    if (helpers < 1 || !pool->run(helpers, job)) job.drain();
}

}  // namespace badam
