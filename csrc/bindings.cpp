// The extension module overflow_fast._C.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "cpu/kernels.h"
#include "device_registry.h"
#include "hook.h"
#include "recorder.h"
#include "scan.h"
#include "stat_binding.h"
#include "tensor_view.h"

namespace overflow_fast {

namespace {

enum class ScanBackend : uint8_t {
  kAuto,       // the kernels of the tensor's device, else torch operations
  kComposite,  // torch operations
  kDevice,     // the kernels registered for the tensor's device, also for the CPU
};

// For each tensor its stat as (abs_min, abs_max, num_nan, num_inf), or its Readability if that is
// not kReadable.
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
      stats[i] = stat_tuple(scan_here(tensor, view), view.dtype);
    } else {
      others.push_back({tensor, view, {}});
      places.push_back(i);
    }
  }
  if (others.empty()) return stats;
  {
    const py::gil_scoped_release release;
    scan_on_devices(others, backend == ScanBackend::kComposite);
  }
  for (size_t i = 0; i < others.size(); ++i) {
    stats[places[i]] = stat_tuple(others[i].slot, others[i].view.dtype);
  }
  return stats;
}

py::tuple entry_tuple(const Recorder& recorder, const Entry& entry) {
  py::object value = py::none();
  if (entry.kind == EntryKind::kTensor) value = stat_tuple(entry.stat, entry.dtype);
  if (entry.kind == EntryKind::kNotScanned) value = entry.why;
  return py::make_tuple(const_cast<Recorder&>(recorder).labels().path(entry.listing.label),
                        entry.kind, value, entry.numel, entry.listing.is_quiet, entry.is_bad());
}

py::list entry_list(const Recorder& recorder, const Frame& frame) {
  py::list entries;
  for (const Entry& entry : frame.entries) entries.append(entry_tuple(recorder, entry));
  return entries;
}

void add_recorder(py::module_& m) {
  py::enum_<EntryKind>(m, "EntryKind")
      .value("TENSOR", EntryKind::kTensor)
      .value("NONE", EntryKind::kNone)
      .value("NOT_TENSOR", EntryKind::kNotTensor)
      .value("NOT_SCANNED", EntryKind::kNotScanned);
  py::class_<Frame>(m, "Frame")
      .def_readonly("module", &Frame::module)
      .def_readonly("type", &Frame::type)
      .def_readonly("batch", &Frame::batch)
      .def_readonly("opens_batch", &Frame::opens_batch)
      .def_readonly("is_recomputed", &Frame::is_recomputed)
      .def_readonly("is_bad", &Frame::is_bad);
  py::class_<Coverage>(m, "Coverage")
      .def_readonly("tensors_listed", &Coverage::tensors_listed)
      .def_readonly("tensors_scanned", &Coverage::tensors_scanned)
      .def_readonly("bytes_scanned", &Coverage::bytes_scanned)
      .def_readonly("not_scanned", &Coverage::not_scanned)
      .def("reasons", &Coverage::reasons);
  py::class_<Recorder>(m, "Recorder")
      .def(py::init([](std::optional<int64_t> max_frames, bool strict_compat, bool list_kwargs,
                       bool memo, bool defer, bool fetch_frames) {
             return std::make_unique<Recorder>(
                 max_frames, Options{strict_compat, list_kwargs, memo, defer, fetch_frames});
           }),
           py::arg("max_frames"), py::kw_only(), py::arg("strict_compat") = false,
           py::arg("list_kwargs") = false, py::arg("memo") = true, py::arg("defer") = false,
           py::arg("fetch_frames") = false)
      .def_readwrite("max_frames", &Recorder::max_frames)
      .def_readwrite("in_step", &Recorder::in_step)
      .def_readwrite("watches_every_frame", &Recorder::watches_every_frame)
      .def_readwrite("total_calls", &Recorder::total_calls)
      .def_property_readonly("coverage", &Recorder::coverage)
      .def_property_readonly("num_syncs", &Recorder::num_syncs)
      .def_property_readonly("last_batch", &Recorder::last_batch)
      .def("entries", &entry_list)
      .def("history",
           [](const Recorder& self) {
             return std::vector<Frame>(self.history().begin(), self.history().end());
           })
      .def("clear_history", [](Recorder& self) { self.history().clear(); })
      .def("send", &Recorder::send)
      .def("send_captured", &Recorder::send_captured)
      .def("judge_arrived", &Recorder::judge_arrived, py::arg("max_in_flight"), py::arg("on_batch"),
           py::arg("on_frame"))
      .def("keep", [](Recorder& self, const Frame& frame) { self.keep(Frame(frame)); })
      .def("end_step", &Recorder::end_step)
      .def("begin_batch", &Recorder::begin_batch);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The compiled core of overflow_fast: pointers, slots and devices.";
  py::enum_<Readability>(m, "Readability")
      .value("READABLE", Readability::kReadable)
      .value("UNSUPPORTED", Readability::kUnsupported)
      .value("FREED", Readability::kFreed)
      .value("INDIRECT", Readability::kIndirect);
  add_recorder(m);
  add_frame_hook(m);
  py::enum_<ScanBackend>(m, "ScanBackend")
      .value("AUTO", ScanBackend::kAuto)
      .value("COMPOSITE", ScanBackend::kComposite)
      .value("DEVICE", ScanBackend::kDevice);
  m.def("scan_tensors", &scan_tensors, py::arg("tensors"), py::arg("backend") = ScanBackend::kAuto);
  m.def("has_kernels",
        [](const std::string& type) { return has_kernels(c10::Device(type).type()); });
  // For a device whose kernels are in another library: the address of an OpenDevice.
  m.def("register_device_type", [](const std::string& type, uintptr_t open) {
    register_device_type(c10::Device(type).type(), reinterpret_cast<OpenDevice>(open));
  });
  m.def("isa", [] { return cpu::kernels().isa; });
}

}  // namespace overflow_fast
