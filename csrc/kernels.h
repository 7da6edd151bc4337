// The loops over flat ranges, one table of them per instruction set.
#pragma once

#include <cstdint>

#include "rules.h"

namespace badam {

// Addresses of a row's slots. Null where the codec or the rule has none.
struct Slots {
    void *param, *auxiliary, *m, *v;
    const void* grad;
};

struct Kernels {
    // Update elements [begin, end) of a row.
    using Update = void (*)(const Slots&, int64_t begin, int64_t end, const Scalars&);
    // Sum of squares of elements [begin, end) of a gradient, in fp64, in an order that depends on their number alone.
    using SquareSum = double (*)(const void* grad, int64_t begin, int64_t end);

    const char* isa;
    Update update[Rules::size][WeightCodecs::size][GradDtypes::size];
    SquareSum square_sum[GradDtypes::size];
};

#define BADAM_DECLARE_KERNELS(ISA)      \
    namespace isa_##ISA {               \
    extern const Kernels kernels;       \
    }
BADAM_DECLARE_KERNELS(baseline)
BADAM_DECLARE_KERNELS(avx2)
BADAM_DECLARE_KERNELS(avx512)
#undef BADAM_DECLARE_KERNELS

}  // namespace badam
