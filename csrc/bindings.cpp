// The extension module overflow_fast._C.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "cpu/kernels.h"
#include "device_registry.h"
#include "hidden.h"
#include "hook.h"
#include "metal_launches.h"
#include "recorder.h"
#include "scan.h"
#include "stat_binding.h"
#include "tensor_view.h"
#include "torch_scan.h"

namespace overflow_fast {

namespace {

enum class ScanBackend : uint8_t {
  kAuto,       // the kernels of the tensor's device, else torch operations
  kComposite,  // torch operations
  kDevice,     // the kernels registered for the tensor's device, also for the CPU
};

// Hidden as a context manager.
class HiddenScope {
 public:
  void enter() { hidden_.emplace(); }
  void exit(const py::args&) { hidden_.reset(); }

 private:
  std::optional<Hidden> hidden_;
};

// For each tensor its stat as (abs_min, abs_max, num_nan, num_inf), its Readability if that is not
// kReadable, or a text that says why its device could not scan it.
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
    stats[places[i]] = other.why.empty() ? py::object(stat_tuple(other.slot, other.view.dtype))
                                         : py::object(py::str(other.why));
  }
  return stats;
}

// torch's names, in the order of Dtype.
constexpr const char* kDtypeNames[] = {
    "float64",     "float32",         "float16",         "bfloat16",       "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex128",
    "complex64",   "complex32",       "int64",           "int32",          "int16",
    "int8",        "uint64",          "uint32",          "uint16",         "uint8",
    "bool",
};
static_assert(std::size(kDtypeNames) == static_cast<size_t>(Dtype::kCount));

const char* name_of(Dtype dtype) { return kDtypeNames[static_cast<size_t>(dtype)]; }

py::tuple entry_tuple(const Recorder& recorder, const Entry& entry) {
  py::object value = py::none();
  if (entry.kind == EntryKind::kTensor) value = stat_tuple(entry.stat, entry.dtype);
  if (entry.kind == EntryKind::kNotScanned) value = entry.why;
  return py::make_tuple(
      const_cast<Recorder&>(recorder).labels().path(entry.listing.label, entry.listing.role),
      entry.kind, value, entry.numel, entry.listing.is_quiet, entry.is_bad(), name_of(entry.dtype));
}

py::tuple place_tuple(Recorder& recorder, const Place& place) {
  const Role role = recorder.role_of(place.phase, place.label);
  return py::make_tuple(place.phase, place.module, recorder.labels().path(place.label, role));
}

// (place, abs_max, the largest number of its format, the format).
py::tuple peak_tuple(Recorder& recorder, const Headroom::Peak& peak) {
  const DtypeInfo& info = dtype_info(peak.dtype);
  return py::make_tuple(place_tuple(recorder, peak.place), decode_key(info, peak.max_key),
                        decode_key(info, peak.limit()), name_of(peak.dtype));
}

// (the last peak, the highest abs_max of all steps, inf if there was something worse, the abs_max
// of each of the last steps).
py::tuple course_tuple(Recorder& recorder, const Headroom::Course& course) {
  const DtypeInfo& info = dtype_info(course.last.dtype);
  py::list recent;
  for (uint64_t key : course.recent()) recent.append(decode_key(info, key));
  const double highest = course.has_overflowed ? HUGE_VAL : decode_key(info, course.highest);
  return py::make_tuple(peak_tuple(recorder, course.last), highest, recent);
}

py::list entry_list(const Recorder& recorder, const Frame& frame) {
  py::list entries;
  for (const Entry& entry : frame.entries) entries.append(entry_tuple(recorder, entry));
  return entries;
}

Options options_of(const py::kwargs& kwargs) {
  static const std::unordered_map<std::string, bool Options::*> kByName = {
      {"strict_compat", &Options::strict_compat},
      {"list_kwargs", &Options::list_kwargs},
      {"memo", &Options::use_memo},
      {"defer", &Options::defer},
      {"fetch_frames", &Options::fetch_frames},
      {"gathers", &Options::gathers},
      {"lists_parameters", &Options::lists_parameters},
      {"lists_calls", &Options::lists_calls},
      {"parameters_once", &Options::parameters_once},
      {"watches_gradients", &Options::watches_gradients},
      {"holds_tensors", &Options::holds_tensors},
  };
  Options options;
  for (const auto& [name, value] : kwargs) {
    const auto found = kByName.find(name.cast<std::string>());
    if (found == kByName.end()) throw py::type_error("unknown: " + name.cast<std::string>());
    options.*found->second = value.cast<bool>();
  }
  return options;
}

void add_recorder(py::module_& m) {
  py::enum_<EntryKind>(m, "EntryKind")
      .value("TENSOR", EntryKind::kTensor)
      .value("NONE", EntryKind::kNone)
      .value("NOT_TENSOR", EntryKind::kNotTensor)
      .value("NOT_SCANNED", EntryKind::kNotScanned);
  py::enum_<Role>(m, "Role")
      .value("INPUT", Role::kInput)
      .value("OUTPUT", Role::kOutput)
      .value("GRAD_OUTPUT", Role::kGradOutput)
      .value("WEIGHT", Role::kWeight)
      .value("BUFFER", Role::kBuffer)
      .value("GRADIENT", Role::kGradient)
      .value("OPTIMIZER_STATE", Role::kOptimizerState)
      .value("RECORDED", Role::kRecorded);
  py::enum_<Phase>(m, "Phase")
      .value("FORWARD", Phase::kForward)
      .value("RECOMPUTED", Phase::kRecomputed)
      .value("BACKWARD", Phase::kBackward)
      .value("RECORDED", Phase::kRecorded)
      .value("WEIGHTS", Phase::kWeights)
      .value("BUFFERS", Phase::kBuffers)
      .value("GRADIENTS", Phase::kGradients)
      .value("OPTIMIZER_STATE", Phase::kOptimizerState);
  py::class_<Frame>(m, "Frame")
      .def_readonly("module", &Frame::module)
      .def_readonly("class_name", &Frame::class_name)
      .def_readonly("batch", &Frame::batch)
      .def_readonly("opens_batch", &Frame::opens_batch)
      .def_readonly("phase", &Frame::phase)
      .def_readonly("order", &Frame::order)
      .def_property_readonly("is_recomputed", &Frame::is_recomputed)
      .def_readonly("is_bad", &Frame::is_bad);
  py::class_<Coverage>(m, "Coverage")
      .def_readonly("tensors_listed", &Coverage::tensors_listed)
      .def_readonly("tensors_scanned", &Coverage::tensors_scanned)
      .def_readonly("bytes_scanned", &Coverage::bytes_scanned)
      .def_readonly("not_scanned", &Coverage::not_scanned)
      .def("reasons", &Coverage::reasons);
  py::class_<Call>(m, "Call")
      .def_readonly("module", &Call::module)
      .def_readonly("phase", &Call::phase)
      .def_readonly("order", &Call::order)
      .def_readonly("batch", &Call::batch)
      .def_readonly("thread", &Call::thread)
      .def_readonly("begins_after", &Call::begins_after)
      .def_readonly("ends_before", &Call::ends_before)
      .def_readonly("is_traced", &Call::is_traced)
      .def_readonly("has_unseen", &Call::has_unseen);
  py::class_<Gathered>(m, "Gathered")
      .def_readonly("before", &Gathered::before)
      .def_readonly("bad", &Gathered::bad)
      .def_property_readonly(
          "held", [](const Gathered& self) { return self.held ? self.held : py::none(); });
  py::class_<Recorder>(m, "Recorder")
      .def(py::init([](std::optional<int64_t> max_frames, const py::kwargs& options) {
             return std::make_unique<Recorder>(max_frames, options_of(options));
           }),
           py::arg("max_frames"))
      .def_readwrite("max_frames", &Recorder::max_frames)
      .def_readwrite("in_step", &Recorder::in_step)
      .def_readwrite("lists_parameters", &Recorder::lists_parameters)
      .def_readwrite("is_paused", &Recorder::is_paused)
      .def_readwrite("watches_every_frame", &Recorder::watches_every_frame)
      .def_readwrite("total_calls", &Recorder::total_calls)
      .def_property_readonly("coverage", &Recorder::coverage)
      .def_property_readonly("num_syncs", &Recorder::num_syncs)
      .def_property_readonly("num_sends", &Recorder::num_sends)
      .def_static("num_frames", &Recorder::num_frames)
      .def_property_readonly("last_batch", &Recorder::last_batch)
      .def("entries", &entry_list)
      .def("nonfinite_kinds",
           [](const Recorder&, const Frame& frame) {
             std::vector<uint64_t> kinds;
             for (const Entry& entry : frame.entries) kinds.push_back(entry.stat.nonfinite_kinds());
             return kinds;
           })
      // (how often it had been written to in place, whether autograd knows what made it), of inputs.
      .def("inputs_past",
           [](const Recorder&, const Frame& frame) {
             std::vector<std::pair<uint32_t, bool>> past;
             for (const Entry& entry : frame.entries) {
               past.emplace_back(entry.listing.version, entry.listing.is_computed);
             }
             return past;
           })
      .def("calls", &Recorder::calls)
      .def("forget_calls", &Recorder::forget_calls)
      .def("history",
           [](const Recorder& self) {
             return std::vector<Frame>(self.history().begin(), self.history().end());
           })
      .def("clear_history", [](Recorder& self) { self.history().clear(); })
      .def("send", &Recorder::send)
      .def("send_captured", &Recorder::send_captured)
      .def("want_flags", &Recorder::want_flags)
      .def("take_flags", &Recorder::take_flags)
      .def("judge_arrived", &Recorder::judge_arrived, py::arg("max_in_flight"), py::arg("on_batch"),
           py::arg("on_frame"))
      .def("keep", [](Recorder& self, const Frame& frame) { self.keep(Frame(frame)); })
      .def("record", &Recorder::record, py::arg("phase"), py::arg("names"), py::arg("tensors"))
      .def("set_gradients_wanted", &Recorder::set_gradients_wanted)
      .def("take_gathered", &Recorder::take_gathered)
      .def("forget_parameters", &Recorder::forget_parameters)
      .def_readwrite("counts_underflow", &Recorder::counts_underflow)
      .def("take_underflow",
           [](Recorder& self) {
             py::list taken;
             for (const Underflow::Counts& counts : self.take_underflow()) {
               taken.append(py::make_tuple(place_tuple(self, counts.place), name_of(counts.dtype),
                                           counts.numel, counts.zeros, counts.subnormals));
             }
             return taken;
           })
      .def("set_rules", [](Recorder& self, py::object rules) { self.rules().set(rules); })
      .def("begin_headroom", [](Recorder& self) { self.headroom().begin_step(); })
      .def_property_readonly("is_headroom_spent",
                             [](Recorder& self) { return self.headroom().is_spent(); })
      .def("set_low_headroom", [](Recorder& self, double bits) { self.headroom().set_low(bits); })
      .def("low_headroom",
           [](Recorder& self) {
             py::list low;
             for (const Place& place : self.headroom().low()) {
               const auto* course = self.headroom().find(place);
               if (course != nullptr) low.append(course_tuple(self, *course));
             }
             return low;
           })
      .def("headroom",
           [](Recorder& self) {
             py::list all;
             for (const auto& [_, course] : self.headroom().courses()) {
               all.append(course_tuple(self, course));
             }
             return all;
           })
      .def("least_headroom",
           [](Recorder& self) {
             const auto& peak = self.headroom().least();
             return peak ? py::object(peak_tuple(self, *peak)) : py::none();
           })
      .def("last_peak",
           [](Recorder& self, const Frame& frame, size_t entry) {
             const LabelId label = frame.entries.at(entry).listing.label;
             const auto* course = self.headroom().find({frame.phase, frame.module, label});
             return course ? py::object(peak_tuple(self, course->last)) : py::none();
           })
      .def_readwrite("seconds", &Recorder::seconds)
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
  py::class_<HiddenScope>(m, "Hidden")
      .def(py::init<>())
      .def("__enter__", &HiddenScope::enter)
      .def("__exit__", &HiddenScope::exit);
  add_recorder(m);
  add_frame_hook(m);
  add_hook_functions(m);
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
  // The same for one whose tensors only torch can address; None takes the function back.
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
