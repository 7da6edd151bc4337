// Compiled once per instruction set, with BADAM_ISA and BADAM_ISA_NAME defined. Instantiates nothing from the standard library: such
// code would be shared with sources built for a plainer CPU (see codecs.h).
#include "kernels.h"

namespace badam {
inline namespace BADAM_ISA {
namespace {

template <class Rule, class Codec, class Grad>
void update(const Slots& slots, int64_t begin, int64_t end, const Scalars& scalars) {
    using Primary = typename Codec::Primary::Storage;
    using Auxiliary = typename Codec::Auxiliary;
    constexpr bool has_auxiliary = !__is_same(Auxiliary, None);
    auto* param = static_cast<Primary*>(slots.param);
    auto* auxiliary = static_cast<Auxiliary*>(slots.auxiliary);
    auto* first = static_cast<float*>(slots.m);
    auto* second = static_cast<float*>(slots.v);
    auto* grad = static_cast<const typename Grad::Storage*>(slots.grad);
    const Scalars s = scalars;  // a copy that no store can alias
    // The slots of a row never overlap.
#ifdef __clang__
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (int64_t i = begin; i < end; ++i) {
        Auxiliary aux{};
        if constexpr (has_auxiliary) aux = auxiliary[i];
        float w = Codec::decode(param[i], aux);
        const float g = Grad::load(grad[i]) * s.grad_scale;
        float m = first[i], v = 0;
        if constexpr (Rule::second_moment) v = second[i];
        Rule::update(w, g, m, v, s);
        Codec::encode(w, param[i], aux);
        if constexpr (has_auxiliary) auxiliary[i] = aux;
        first[i] = m;
        if constexpr (Rule::second_moment) second[i] = v;
    }
}

template <class Grad>
double square_sum(const void* address, int64_t begin, int64_t end) {
    constexpr int lanes = 16;
    auto* grad = static_cast<const typename Grad::Storage*>(address);
    double sum[lanes] = {};
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes)
        for (int lane = 0; lane < lanes; ++lane) {
            const double g = Grad::load(grad[i + lane]);
            sum[lane] += g * g;
        }
    for (int lane = 0; i < end; ++i, ++lane) {
        const double g = Grad::load(grad[i]);
        sum[lane] += g * g;
    }
    for (int half = lanes / 2; half; half /= 2)
        for (int lane = 0; lane < half; ++lane) sum[lane] += sum[lane + half];
    return sum[0];
}

template <class Rule, class Codec, class... Grads>
constexpr void fill(Kernels::Update* row, List<Grads...>) {
    ((*row++ = update<Rule, Codec, Grads>), ...);
}

template <class Rule, class... Codecs>
constexpr void fill(Kernels::Update (*rows)[GradDtypes::size], List<Codecs...>) {
    (fill<Rule, Codecs>(*rows++, GradDtypes{}), ...);
}

template <class... RuleTypes, class... Grads>
constexpr Kernels make(List<RuleTypes...>, List<Grads...>) {
    Kernels table = {BADAM_ISA_NAME, {}, {square_sum<Grads>...}};
    auto* rows = table.update;
    (fill<RuleTypes>(*rows++, WeightCodecs{}), ...);
    return table;
}

}  // namespace

extern constexpr Kernels kernels = make(Rules{}, GradDtypes{});

}  // namespace BADAM_ISA
}  // namespace badam
