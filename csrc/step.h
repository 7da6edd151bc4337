// One step over the rows of a visit: norm, clip factor, non-finite check, update.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace badam {

// One row of Visit.table, as visit.COLUMNS lists it. Addresses count bytes; 0 means none.
struct Row {
    int64_t param, auxiliary, m, v, grad, numel, codec, grad_dtype, group, step;
};

// The hyper-parameters of a parameter group, as visit.HYPER lists them.
struct Hyper {
    double lr, beta1, beta2, eps, weight_decay;
};

struct Step {
    Row* rows;
    int64_t num_rows;
    const Hyper* groups;
    int64_t num_groups;
    int rule;
    std::optional<double> scale, max_norm;
    int threads;
};

// Does what badam_kernels/backends/__init__.py says of `apply`. Bits do not depend on `threads` nor on `kernels`.
// Throws std::invalid_argument, before anything is written, if a code in a row is out of range.
std::pair<std::optional<double>, bool> apply(const Step& step, const Kernels& kernels);

// Kernels that this CPU can run, the best last.
const std::vector<const Kernels*>& available_kernels();

}  // namespace badam
