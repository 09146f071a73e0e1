// The extension module overflow_fast._C.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/utils/pybind.h>

#include "cpu/kernels.h"
#include "scan.h"
#include "stat_binding.h"
#include "tensor_view.h"

namespace overflow_fast {

namespace {

// A readable tensor's stat as (abs_min, abs_max, num_nan, num_inf), or its Readability.
py::object scan_one(const at::Tensor& tensor, bool composite) {
  View view{};
  const Readability readability = view_of(tensor, view);
  if (readability != Readability::kReadable) return py::cast(readability);
  Slot slot;
  if (tensor.device().is_cpu() && !composite) {
    const py::gil_scoped_release release;
    scan_cpu(view, slot);
  } else {
    const c10::AutoGradMode no_grad(false);
    const at::Tensor stat = stat_composite(tensor.detach()).cpu();
    slot = *static_cast<const Slot*>(stat.const_data_ptr());
  }
  return stat_tuple(slot, view.dtype);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The compiled core of overflow_fast: pointers, slots and devices.";
  py::enum_<Readability>(m, "Readability")
      .value("READABLE", Readability::kReadable)
      .value("UNSUPPORTED", Readability::kUnsupported)
      .value("FREED", Readability::kFreed)
      .value("INDIRECT", Readability::kIndirect);
  m.def("scan_one", &scan_one, py::arg("tensor"), py::arg("composite") = false);
  m.def("isa", [] { return cpu::kernels().isa; });
}

}  // namespace overflow_fast
