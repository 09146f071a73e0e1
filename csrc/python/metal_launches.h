// What Python needs to dispatch MPS's kernel: overflow_fast/metal/__init__.py.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

// Adds `metal_launches` to the module.
void add_metal(pybind11::module_& m);

}  // namespace overflow_fast
