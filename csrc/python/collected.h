// The objects that Python's collector knows.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

void bind_collected(pybind11::module_& m);

}  // namespace overflow_fast
