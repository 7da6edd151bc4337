// The parts of badam_kernels._C.
#pragma once

#include <pybind11/pybind11.h>

namespace badam {

void bind_store(pybind11::module_& m);

}  // namespace badam
