// Compiled once per instruction set, with BADAM_ISA and BADAM_ISA_NAME defined. Instantiates nothing from the standard
// library: such code would be shared with sources built for a plainer CPU (see codecs.h).
#include "kernels.h"

namespace badam {
inline namespace BADAM_ISA {
namespace {

// A tile goes through short loops, with its weights in the first-level cache between them, instead of one long one: a loop
// body that decodes, divides and encodes fills the CPU's reorder window before the division is through. (Measured on Zen 3,
// in cache, split: 0.94 -> 0.72 ns per element.) And there is no loop to compile for each pair of rule and codec.
constexpr int64_t tile_numel = 256;

template <class Codec>
__attribute__((noinline)) void decode(const typename Codec::Primary::Storage* __restrict primary,
                                      const typename Codec::Auxiliary* __restrict auxiliary, float* __restrict w, int64_t n) {
    for (int64_t i = 0; i < n; ++i) w[i] = Codec::decode(primary[i], auxiliary[i]);
}

template <class Codec>
__attribute__((noinline)) void encode(const float* __restrict w, typename Codec::Primary::Storage* __restrict primary,
                                      typename Codec::Auxiliary* __restrict auxiliary, int64_t n) {
    for (int64_t i = 0; i < n; ++i) Codec::encode(w[i], primary[i], auxiliary[i]);
}

template <class Rule, class Grad>
__attribute__((noinline)) void apply(float* __restrict w, const typename Grad::Storage* __restrict grad, float* __restrict first,
                                     float* __restrict second, int64_t n, const Scalars& scalars) {
    const Scalars s = scalars;  // a copy, which no store can change
    for (int64_t i = 0; i < n; ++i) {
        const float g = Grad::load(grad[i]) * s.grad_scale;
        if constexpr (Rule::second_moment) {
            Rule::update(w[i], g, first[i], second[i], s);
        } else {
            float unused = 0;
            Rule::update(w[i], g, first[i], unused, s);
        }
    }
}

template <class Rule, class Codec, class Grad>
void update(const Slots& slots, int64_t begin, int64_t end, const Scalars& scalars) {
    alignas(64) float decoded[tile_numel];
    for (; begin < end; begin += tile_numel) {
        const int64_t n = end - begin < tile_numel ? end - begin : tile_numel;
        const auto param = static_cast<typename Codec::Primary::Storage*>(slots.param) + begin;
        const auto grad = static_cast<const typename Grad::Storage*>(slots.grad) + begin;
        const auto first = static_cast<float*>(slots.m) + begin;
        float* second = nullptr;
        if constexpr (Rule::second_moment) second = static_cast<float*>(slots.v) + begin;
        if constexpr (__is_same(Codec, Plain)) {
            apply<Rule, Grad>(param, grad, first, second, n, scalars);
        } else {
            const auto auxiliary = static_cast<typename Codec::Auxiliary*>(slots.auxiliary) + begin;
            decode<Codec>(param, auxiliary, decoded, n);
            apply<Rule, Grad>(decoded, grad, first, second, n, scalars);
            encode<Codec>(decoded, param, auxiliary, n);
        }
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
