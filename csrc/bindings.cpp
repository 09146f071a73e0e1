// The extension module overflow_fast._C.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "cpu/kernels.h"
#include "hook.h"
#include "recorder.h"
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
  py::class_<Recorder>(m, "Recorder")
      .def(py::init([](std::optional<int64_t> max_frames, bool strict_compat, bool list_kwargs,
                       bool memo, bool composite) {
             return std::make_unique<Recorder>(
                 max_frames, Options{strict_compat, list_kwargs, memo, composite});
           }),
           py::arg("max_frames"), py::kw_only(), py::arg("strict_compat") = false,
           py::arg("list_kwargs") = false, py::arg("memo") = true, py::arg("composite") = false)
      .def_readwrite("max_frames", &Recorder::max_frames)
      .def_readwrite("in_step", &Recorder::in_step)
      .def_readwrite("watches_every_frame", &Recorder::watches_every_frame)
      .def_readwrite("total_calls", &Recorder::total_calls)
      .def_readonly("bytes_scanned", &Recorder::bytes_scanned)
      .def_readonly("tensors_scanned", &Recorder::tensors_scanned)
      .def_readonly("tensors_listed", &Recorder::tensors_listed)
      .def_property_readonly("last_batch", &Recorder::last_batch)
      .def_property_readonly("has_waiting_frames", &Recorder::has_waiting_frames)
      .def("entries", &entry_list)
      .def("history",
           [](const Recorder& self) {
             return std::vector<Frame>(self.history().begin(), self.history().end());
           })
      .def("clear_history", [](Recorder& self) { self.history().clear(); })
      .def("resolve", &Recorder::resolve)
      .def("judge",
           [](Recorder& self, const Frame& frame) {
             Frame copy = frame;
             return self.judge(copy);
           })
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
  m.def("scan_one", &scan_one, py::arg("tensor"), py::arg("composite") = false);
  m.def("isa", [] { return cpu::kernels().isa; });
}

}  // namespace overflow_fast
