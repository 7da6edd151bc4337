// badam_kernels._C: names and docstrings only. Tensors come as addresses, so no torch symbol is needed and any torch will do.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "step.h"

namespace py = pybind11;
using namespace badam;

namespace {

using Names = std::vector<std::string>;

template <class... Types>
Names names(List<Types...>) {
    return {Types::name...};
}

template <class... Codecs>
std::vector<std::tuple<std::string, std::string, std::string>> codec_names(List<Codecs...>) {
    return {{Codecs::name, Codecs::Primary::name, Codecs::auxiliary_name}...};
}

Names isa_names() {
    Names found;
    for (const Kernels* kernels : available_kernels()) found.emplace_back(kernels->isa);
    return found;
}

const Kernels& kernels_for(const std::optional<std::string>& isa) {
    const auto& available = available_kernels();
    if (!isa) return *available.back();
    for (const Kernels* kernels : available)
        if (kernels->isa == *isa) return *kernels;
    throw std::invalid_argument("isa must be one of _C.ISAS; got '" + *isa + "'");
}

std::pair<std::optional<double>, bool> apply_table(uintptr_t table, int64_t rows, const std::vector<double>& hyper, int rule,
                                                   std::optional<double> scale, std::optional<double> max_norm, int threads,
                                                   const std::optional<std::string>& isa) {
    if (rule < 0 || rule >= Rules::size) throw std::invalid_argument("rule must be an index into _C.RULES");
    constexpr size_t width = sizeof(Hyper) / sizeof(double);
    if (hyper.size() % width) throw std::invalid_argument("hyper must list _C.HYPER for every parameter group");
    const Step step = {reinterpret_cast<Row*>(table), rows, reinterpret_cast<const Hyper*>(hyper.data()),
                       static_cast<int64_t>(hyper.size() / width), rule, scale, max_norm, threads};
    return apply(step, kernels_for(isa));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "Compiled mechanisms of badam_kernels: raw addresses in, GIL released.";
    m.attr("RULES") = names(Rules{});
    m.attr("CODECS") = codec_names(WeightCodecs{});
    m.attr("GRAD_DTYPES") = names(GradDtypes{});
    m.attr("COLUMNS") = Names{"param", "auxiliary", "m", "v", "grad", "numel", "codec", "grad_dtype", "group", "step"};
    m.attr("HYPER") = Names{"lr", "beta1", "beta2", "eps", "weight_decay"};
    m.attr("ISAS") = isa_names();
    m.def("apply", &apply_table, py::arg("table"), py::arg("rows"), py::arg("hyper"), py::arg("rule"), py::arg("scale"),
          py::arg("max_norm"), py::arg("threads"), py::arg("isa") = py::none(), py::call_guard<py::gil_scoped_release>(),
          "One step over the `rows` rows of the int64 table at address `table` (COLUMNS), in place: backends.apply.\n\n"
          "hyper: HYPER of every parameter group. rule: index into RULES. isa: one of ISAS, None for the last, which is the best.\n"
          "Returns (norm or None, found_inf). Advances the step column of rows that have a gradient.");
    bind_store(m);
}
