// Threads that stay between steps.
#pragma once

#include <cstdint>
#include <functional>

namespace badam {

// Calls task(i) once for every i in [0, count), on the caller and up to `threads` - 1 workers, and returns when all are done.
// Tasks must not throw. Workers are made when first asked for and then sleep. Any number of callers may come at once, and a
// forked child may come too: it gets workers of its own.
void parallel_for(int threads, int64_t count, const std::function<void(int64_t)>& task);

// The default floating-point mode (subnormals kept, round to nearest) on this thread while in scope, whatever
// torch.set_flush_denormal asked for: otherwise bits would depend on which thread computed them.
class DefaultFloatMode {
public:
    DefaultFloatMode();
    ~DefaultFloatMode();
    DefaultFloatMode(const DefaultFloatMode&) = delete;

private:
    uint64_t saved_;
};

}  // namespace badam
