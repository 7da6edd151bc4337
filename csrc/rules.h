// Rules: the update of one element. The C++ twin of badam_kernels/rules.py, operation by operation in the same order, each
// rounded to fp32 once: compile without contraction and without fast math.
#pragma once

#include <math.h>

#include "codecs.h"

namespace badam {

// rules.Scalars, each computed in fp64 and rounded to fp32 once.
struct Scalars {
    float grad_scale, step_size, beta1, one_minus_beta1, one_minus_beta2, root_scale, eps, decay;
};

inline namespace BADAM_ISA {

BADAM_HD void moments(float g, float& m, float& v, const Scalars& s) {
    m = m + s.one_minus_beta1 * (g - m);
    v = v + s.one_minus_beta2 * (g * g - v);
}

BADAM_HD float adaptive_update(float m, float v, const Scalars& s) {
    return s.step_size * (m / (sqrtf(v) * s.root_scale + s.eps));
}

// w <- w - [ lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps) + lr * wd * w ]
struct AdamW {
    static constexpr const char* name = "adamw";
    static constexpr bool second_moment = true, decoupled = true, adaptive = true;

    BADAM_HD static void update(float& w, float g, float& m, float& v, const Scalars& s) {
        moments(g, m, v, s);
        w = w - (adaptive_update(m, v, s) + s.decay * w);
    }
};

// g <- g + wd * w,  w <- w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
struct Adam {
    static constexpr const char* name = "adam";
    static constexpr bool second_moment = true, decoupled = false, adaptive = true;

    BADAM_HD static void update(float& w, float g, float& m, float& v, const Scalars& s) {
        moments(g + s.decay * w, m, v, s);
        w = w - adaptive_update(m, v, s);
    }
};

// m <- b1 * m + (g + wd * w),  w <- w - lr * m
struct Sgd {
    static constexpr const char* name = "sgd";
    static constexpr bool second_moment = false, decoupled = false, adaptive = false;

    BADAM_HD static void update(float& w, float g, float& m, float&, const Scalars& s) {
        m = s.beta1 * m + (g + s.decay * w);
        w = w - s.step_size * m;
    }
};

// In the order of rules.RULES.
using Rules = List<AdamW, Adam, Sgd>;

}  // namespace BADAM_ISA
}  // namespace badam
