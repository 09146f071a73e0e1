// The Python functions that the extension calls. It imports no module of the package:
// overflow_fast/scanner/callbacks.py registers them, which whatever scans imports first.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

namespace py = pybind11;

struct Callbacks {
  py::object resolve;  // (tensor) -> the tensor that has its values, or why there is none
  py::object reason;   // (tensor, readability) -> why it cannot be scanned
  py::object warn_of_no_kernels;      // () -> None
  py::object warn_of_unused_kernels;  // (device, why) -> None
  py::object warn_of_lack;            // (what the device's operations lack) -> None
  py::object layout;                  // (type) -> tree.Layout
  py::object children;                // (value) -> the list of its tree.Parts and values, or None
  py::object type_name;               // (type) -> its qualified name
};

const Callbacks& callbacks();
void bind_callbacks(py::module_& m);

}  // namespace overflow_fast
