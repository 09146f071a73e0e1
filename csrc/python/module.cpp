// The extension module overflow_fast._C.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../record/records.h"
#include "../record/unwatched.h"
#include "../scan/callbacks.h"
#include "../scan/cpu/kernels.h"
#include "../scan/device_registry.h"
#include "../scan/kernel_check.h"
#include "../scan/scan.h"
#include "../scan/tensor_view.h"
#include "../scan/torch_scan.h"
#include "../torch_internals/hidden.h"
#include "../torch_internals/unprofiled.h"
#include "bind_state.h"
#include "call_watch.h"
#include "collected.h"
#include "held_values.h"
#include "hook.h"
#include "metal_launches.h"

namespace overflow_fast {

namespace {

enum class ScanBackend : uint8_t {
  kAuto,       // the kernels of the tensor's device, else torch operations
  kComposite,  // torch operations
  kDevice,     // the kernels registered for the tensor's device, also for the CPU
};

// A guard of C++ as a context manager.
template <class Guard>
class Scope {
 public:
  void enter() { guard_.emplace(); }
  void exit(const py::args&) { guard_.reset(); }

 private:
  std::optional<Guard> guard_;
};

template <class Guard>
void bind_scope(py::module_& m, const char* name) {
  py::class_<Scope<Guard>>(m, name)
      .def(py::init<>())
      .def("__enter__", &Scope<Guard>::enter)
      .def("__exit__", &Scope<Guard>::exit);
}

// For each tensor its stat, its Readability if that is not kReadable, or a text that says why its
// device could not scan it.
py::list scan_tensors(const py::list& tensors, ScanBackend backend) {
  py::list stats(tensors.size());
  std::vector<ToScan> others;
  std::vector<size_t> places;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor tensor = tensors[i].cast<at::Tensor>();
    View view{};
    const Readability readability = view_of(tensor, view);
    if (readability != Readability::kReadable) {
      stats[i] = readability;
    } else if (tensor.is_cpu() && backend == ScanBackend::kAuto) {
      stats[i] = make_stat(scan_here(tensor, view), view.dtype);
    } else {
      others.push_back({tensor, view, {}, {}});
      places.push_back(i);
    }
  }
  if (others.empty()) return stats;
  {
    const py::gil_scoped_release release;
    scan_on_devices(others, backend == ScanBackend::kComposite);
  }
  for (size_t i = 0; i < others.size(); ++i) {
    const ToScan& other = others[i];
    stats[places[i]] = other.why.empty() ? make_stat(other.slot, other.view.dtype)
                                         : py::object(py::str(other.why));
  }
  return stats;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The compiled core of overflow_fast: pointers, slots and devices.";
  py::enum_<Readability>(m, "Readability")
      .value("READABLE", Readability::kReadable)
      .value("UNSUPPORTED", Readability::kUnsupported)
      .value("FREED", Readability::kFreed)
      .value("WRAPPER", Readability::kWrapper);
  bind_scope<Hidden>(m, "Hidden");
  bind_scope<Unwatched>(m, "Unwatched");
  bind_scope<Unprofiled>(m, "Unprofiled");
  m.def("is_unwatched", [] { return Unwatched::depth() > 0; });
  bind_callbacks(m);
  bind_stat(m);
  bind_records(m);
  bind_rows(m);
  bind_recorder(m);
  bind_state(m);
  bind_held_values(m);
  bind_call_watch(m);
  bind_collected(m);
  add_frame_hook(m);
  add_hook_functions(m);
  py::enum_<ScanBackend>(m, "ScanBackend")
      .value("AUTO", ScanBackend::kAuto)
      .value("COMPOSITE", ScanBackend::kComposite)
      .value("DEVICE", ScanBackend::kDevice);
  m.def("scan_tensors", &scan_tensors, py::arg("tensors"), py::arg("backend") = ScanBackend::kAuto);
  m.def("has_kernels",
        [](const std::string& type) { return has_kernels(c10::Device(type).type()); });
  // Incurs a sync for a device that was not used before.
  m.def("check_kernels", [](const std::string& device) { checked_device(c10::Device(device)); });
  m.def("unused_kernels", &unused_kernels);
  // For a device whose kernels are in another library: the address of an OpenDevice.
  m.def("register_device_type", [](const std::string& type, uintptr_t open) {
    const c10::DeviceType known = c10::Device(type).type();
    forget_failed_checks(known);
    register_device_type(known, reinterpret_cast<OpenDevice>(open));
  });
  // The same for a device whose tensors only torch can address; None unregisters the function.
  m.def("register_scan", [](const std::string& type, py::object function) {
    register_scan(c10::Device(type).type(), std::move(function));
  });
  add_metal(m);
  m.def("isa", [] { return cpu::kernels().isa; });
  // Kinds of non-finite values, for rules.
  m.attr("POSITIVE_INF") = static_cast<int>(Slot::kPositiveInf);
  m.attr("NEGATIVE_INF") = static_cast<int>(Slot::kNegativeInf);
  m.attr("NAN") = static_cast<int>(Slot::kNan);
}

}  // namespace overflow_fast
