#include "step.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "threads.h"

namespace badam {
namespace {

// A part of one row. Parts depend on the row alone, so that the sums over them do not depend on the number of threads.
struct Part {
    const Row* row;
    int64_t begin, end;
};

constexpr int64_t part_numel = 1 << 15;
constexpr int64_t numel_per_thread = 1 << 15;  // below this, waking a worker costs more than it brings

template <class T>
T* pointer(int64_t address) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

void check(const Step& step) {
    const auto within = [](int64_t code, int64_t size) { return 0 <= code && code < size; };
    for (int64_t i = 0; i < step.num_rows; ++i) {
        const Row& row = step.rows[i];
        if (!within(row.codec, WeightCodecs::size) || !within(row.grad_dtype, GradDtypes::size) ||
            !within(row.group, step.num_groups) || row.numel < 0)
            throw std::invalid_argument("row " + std::to_string(i) + " of the table holds a code that is out of range");
    }
}

// The parts of all rows that have a gradient.
std::vector<Part> partition(const Step& step) {
    std::vector<Part> parts;
    parts.reserve(step.num_rows);
    for (const Row* row = step.rows; row != step.rows + step.num_rows; ++row) {
        if (!row->grad) continue;
        for (int64_t begin = 0; begin < row->numel; begin += part_numel)
            parts.push_back({row, begin, std::min(begin + part_numel, row->numel)});
    }
    return parts;
}

int useful_threads(const Step& step, const std::vector<Part>& parts) {
    int64_t numel = 0;
    for (const Part& part : parts) numel += part.end - part.begin;
    return static_cast<int>(std::min<int64_t>(step.threads, 1 + numel / numel_per_thread));
}

double norm(const std::vector<Part>& parts, int threads, const Kernels& kernels) {
    std::vector<double> sums(parts.size());
    parallel_for(threads, static_cast<int64_t>(parts.size()), [&](int64_t i) {
        const Part& part = parts[i];
        sums[i] = kernels.square_sum[part.row->grad_dtype](pointer<const void>(part.row->grad), part.begin, part.end);
    });
    double total = 0;
    for (const double sum : sums) total += sum;
    return std::sqrt(total);
}

struct RuleTraits {
    bool decoupled, adaptive;
};

template <class... Types>
RuleTraits traits(int rule, List<Types...>) {
    static constexpr RuleTraits table[] = {{Types::decoupled, Types::adaptive}...};
    return table[rule];
}

// rules.scalars
Scalars scalars(RuleTraits rule, const Hyper& group, int64_t step, double grad_scale) {
    const double correction1 = rule.adaptive ? 1.0 - std::pow(group.beta1, static_cast<double>(step)) : 1.0;
    const double correction2 = rule.adaptive ? 1.0 - std::pow(group.beta2, static_cast<double>(step)) : 1.0;
    Scalars s;
    s.grad_scale = static_cast<float>(grad_scale);
    s.step_size = static_cast<float>(group.lr / correction1);
    s.beta1 = static_cast<float>(group.beta1);
    s.one_minus_beta1 = static_cast<float>(1.0 - group.beta1);
    s.one_minus_beta2 = static_cast<float>(1.0 - group.beta2);
    s.root_scale = static_cast<float>(1.0 / std::sqrt(correction2));
    s.eps = static_cast<float>(group.eps);
    s.decay = static_cast<float>(group.weight_decay * (rule.decoupled ? group.lr : 1.0));
    return s;
}

// Advances the step of every row that has a gradient; the scalars of every row.
std::vector<Scalars> advance(const Step& step, double grad_scale) {
    const RuleTraits rule = traits(step.rule, Rules{});
    std::vector<Scalars> all(step.num_rows);
    const Row* last = nullptr;
    for (int64_t i = 0; i < step.num_rows; ++i) {
        Row& row = step.rows[i];
        if (!row.grad) continue;
        ++row.step;
        const bool same = last && last->group == row.group && last->step == row.step;
        all[i] = same ? all[last - step.rows] : scalars(rule, step.groups[row.group], row.step, grad_scale);
        last = &row;
    }
    return all;
}

}  // namespace

std::pair<std::optional<double>, bool> apply(const Step& step, const Kernels& kernels) {
    check(step);
    const DefaultFloatMode mode;
    const std::vector<Part> parts = partition(step);
    const int threads = useful_threads(step, parts);
    std::optional<double> total;
    double grad_scale = 1.0;
    if (step.scale || step.max_norm) {
        grad_scale = step.scale.value_or(1.0);
        total = norm(parts, threads, kernels) * std::abs(grad_scale);
        if (!std::isfinite(*total)) return {total, true};
        if (step.max_norm) grad_scale *= std::min(1.0, *step.max_norm / (*total + 1e-6));
    }
    const std::vector<Scalars> all = advance(step, grad_scale);
    const auto& update = kernels.update[step.rule];
    parallel_for(threads, static_cast<int64_t>(parts.size()), [&](int64_t i) {
        const Part& part = parts[i];
        const Row& row = *part.row;
        const Slots slots = {pointer<void>(row.param), pointer<void>(row.auxiliary), pointer<void>(row.m), pointer<void>(row.v),
                             pointer<const void>(row.grad)};
        update[row.codec][row.grad_dtype](slots, part.begin, part.end, all[&row - step.rows]);
    });
    return {total, false};
}

const std::vector<const Kernels*>& available_kernels() {
    static const std::vector<const Kernels*> available = [] {
        std::vector<const Kernels*> found = {&isa_baseline::kernels};
#ifdef BADAM_X86
        if (__builtin_cpu_supports("avx2")) found.push_back(&isa_avx2::kernels);
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            found.push_back(&isa_avx512::kernels);
#endif
        return found;
    }();
    return available;
}

}  // namespace badam
