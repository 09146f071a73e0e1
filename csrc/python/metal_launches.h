// The launches of MPS's kernel, which overflow_fast/scanner/metal/__init__.py dispatches.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

// Adds `metal_launches` to the module.
void add_metal(pybind11::module_& m);

}  // namespace overflow_fast
