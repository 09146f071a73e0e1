// Reads many weights, and the tables of many modules, in one pass.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

void bind_state(pybind11::module_& m);

}  // namespace overflow_fast
