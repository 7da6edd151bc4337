#include <unistd.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "copier.h"
#include "stream_copy.h"

namespace badam {
namespace {

class Flag {
public:
    void raise() {
        {
            const std::lock_guard lock(mutex_);
            up_ = true;
        }
        changed_.notify_all();
    }
    bool up() {
        const std::lock_guard lock(mutex_);
        return up_;
    }
    void wait() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return up_; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool up_ = false;
};

// A thread that does what it is given, in order.
class Worker {
public:
    Worker() : thread_([this] { run(); }) {}
    ~Worker() {
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

private:
    void run() {
        for (;;) {
            std::unique_lock lock(mutex_);
            given_.wait(lock, [this] { return !tasks_.empty(); });
            const std::function<void()> task = std::move(tasks_.front());
            tasks_.pop_front();
            lock.unlock();
            if (!task) return;
            task();
        }
    }

    std::mutex mutex_;
    std::condition_variable given_;
    std::deque<std::function<void()>> tasks_;
    std::thread thread_;
};

class ThreadCopier final : public Copier {
public:
    ~ThreadCopier() override {
        // A forked child has the workers' memory, but not the threads: it must not join them.
        if (getpid() != process_)
            for (auto& worker : workers_) static_cast<void>(worker.release());
    }

    void copy(Lane lane, std::byte* to, const std::byte* from, size_t bytes) override {
        worker(lane).push([=] { stream_copy(to, from, bytes); });
    }
    Event record(Lane lane) override {
        const auto flag = std::make_shared<Flag>();
        worker(lane).push([flag] { flag->raise(); });
        return flag;
    }
    void wait(Lane lane, const Event& event) override {
        if (!event) return;
        worker(lane).push([flag = std::static_pointer_cast<Flag>(event)] { flag->wait(); });
    }
    Event record_compute(Stream) override { return {}; }
    void wait_compute(Stream, const Event& event) override { synchronize(event); }
    bool done(const Event& event) override { return !event || std::static_pointer_cast<Flag>(event)->up(); }
    void synchronize(const Event& event) override {
        if (event) std::static_pointer_cast<Flag>(event)->wait();
    }
    std::shared_ptr<std::byte> ring(size_t) override { return {}; }

private:
    Worker& worker(Lane lane) {
        auto& worker = workers_.at(static_cast<size_t>(lane));
        if (!worker) worker = std::make_unique<Worker>();
        return *worker;
    }

    const pid_t process_ = getpid();
    std::array<std::unique_ptr<Worker>, num_lanes> workers_;
};

}  // namespace

std::unique_ptr<Copier> thread_copier() { return std::make_unique<ThreadCopier>(); }

}  // namespace badam
