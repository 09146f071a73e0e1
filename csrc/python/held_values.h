// Holds what a call without autograd is given, so that it can be made again.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

void bind_held_values(pybind11::module_& m);

}  // namespace overflow_fast
