// The records of records.h as Python classes: attributes to read, none to write, nothing to index.
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <functional>

#include "../record/recorder.h"
#include "../record/records.h"
#include "bound.h"

namespace overflow_fast {

namespace {

// Indexed by Dtype.
constexpr const char* kDtypeNames[] = {
#define OVERFLOW_FAST_NAME(name, torch_name, python_name, ...) python_name,
    OVERFLOW_FAST_DTYPES(OVERFLOW_FAST_NAME)
#undef OVERFLOW_FAST_NAME
};

void bind_enums(py::module_& m) {
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
  py::enum_<FrameKind>(m, "FrameKind")
      .value("FORWARD", FrameKind::kForward)
      .value("RECOMPUTED", FrameKind::kRecomputed)
      .value("BACKWARD", FrameKind::kBackward)
      .value("RECORDED", FrameKind::kRecorded)
      .value("WEIGHTS", FrameKind::kWeights)
      .value("BUFFERS", FrameKind::kBuffers)
      .value("GRADIENTS", FrameKind::kGradients)
      .value("OPTIMIZER_STATE", FrameKind::kOptimizerState);
  py::enum_<LabelStyle>(m, "LabelStyle")
      .value("NAME", LabelStyle::kName)
      .value("INDEX", LabelStyle::kIndex)
      .value("KEY", LabelStyle::kKey)
      .value("ATTRIBUTE", LabelStyle::kAttribute);
}

void bind_labels(py::module_& m) {
  Bound<LabelPart>(m, "LabelPart")
      .attribute("style", &LabelPart::style)
      .attribute("value", &LabelPart::value)
      .type()
      .def(py::init([](LabelStyle style, py::object value) {
             return LabelPart{style, std::move(value)};
           }),
           py::arg("style"), py::arg("value"));
  Bound<Label>(m, "Label")
      .attribute("role", &Label::role)
      .attribute("name", &Label::name)
      .attribute("parts", &Label::parts)
      .type()
      .def(py::self == py::self);
  Bound<NamedPlace>(m, "Place")
      .attribute("kind", [](const NamedPlace& self) { return self.place.kind; })
      .attribute("module", [](const NamedPlace& self) { return self.place.module; })
      .attribute("label", &NamedPlace::label);
}

py::object stat_of(const Entry& entry) {
  return entry.kind == EntryKind::kTensor ? make_stat(entry.stat, entry.dtype) : py::none();
}

py::object reason_of(const Entry& entry) {
  return entry.kind == EntryKind::kNotScanned ? entry.why : py::none();
}

void bind_entry(py::module_& m) {
  Bound<Named<Entry>>(m, "Entry")
      .attribute("place", &Named<Entry>::place)
      .attribute("kind", &Entry::kind)
      .attribute("stat", stat_of)
      .attribute("reason", reason_of)
      .attribute("numel", &Entry::numel)
      .attribute("dtype", [](const Entry& self) { return name_of(self.dtype); })
      .attribute("is_bad", &Entry::is_bad)
      .attribute("is_unseen", &Entry::is_unseen)
      .attribute("nonfinite_kinds", [](const Entry& self) { return self.stat.nonfinite_kinds(); })
      .attribute("only_if_bad", [](const Entry& self) { return self.listing.only_if_bad; })
      .attribute("version", [](const Entry& self) { return self.listing.version; })
      .attribute("is_computed", [](const Entry& self) { return self.listing.is_computed; })
      .attribute("node", [](const Entry& self) { return self.listing.node; })
      .attribute("seen_in", &Entry::seen_in)
      .attribute("is_rewritten", &Entry::is_rewritten)
      .type()
      .def_property_readonly("label", [](const Named<Entry>& self) { return self.place.label; })
      .def_property_readonly("role",
                             [](const Named<Entry>& self) { return self.place.label.role; });
}

double number(const Headroom::Peak& peak, uint64_t key) {
  return decode_key(dtype_info(peak.dtype), key);
}

double highest_of(const Headroom::History& history) {
  return history.has_overflowed ? HUGE_VAL : number(history.last, history.highest);
}

std::vector<double> recent_of(const Headroom::History& history) {
  std::vector<double> recent;
  for (const uint64_t key : history.recent()) recent.push_back(number(history.last, key));
  return recent;
}

void bind_headroom(py::module_& m) {
  Bound<Named<Headroom::Peak>>(m, "Peak")
      .attribute("place", &Named<Headroom::Peak>::place)
      .attribute("abs_max", [](const Headroom::Peak& self) { return number(self, self.max_key); })
      .attribute("limit", [](const Headroom::Peak& self) { return number(self, self.limit()); })
      .attribute("dtype", [](const Headroom::Peak& self) { return name_of(self.dtype); });
  Bound<Named<Headroom::History>>(m, "HeadroomHistory")
      .attribute("last",
                 [](const Named<Headroom::History>& self) {
                   return Named<Headroom::Peak>{self.place, self.record.last};
                 })
      .attribute("highest", highest_of)
      .attribute("recent", recent_of);
  Bound<Named<Underflow::Counts>>(m, "Underflow")
      .attribute("place", &Named<Underflow::Counts>::place)
      .attribute("dtype", [](const Underflow::Counts& self) { return name_of(self.dtype); })
      .attribute("numel", &Underflow::Counts::numel)
      .attribute("num_zero", &Underflow::Counts::num_zero)
      .attribute("num_subnormal", &Underflow::Counts::num_subnormal)
      .attribute("num_limit", &Underflow::Counts::num_limit)
      .attribute("num_positive", &Underflow::Counts::num_positive);
}

void bind_frames(py::module_& m) {
  Bound<Frame>(m, "Frame")
      .attribute("module", &Frame::module)
      .attribute("class_name", &Frame::class_name)
      .attribute("batch", &Frame::batch)
      .attribute("opens_batch", &Frame::opens_batch)
      .attribute("kind", &Frame::kind)
      .attribute("order", &Frame::order)
      .attribute("is_recomputed", &Frame::is_recomputed)
      .attribute("is_bad", &Frame::is_bad);
  Bound<Coverage>(m, "Coverage")
      .attribute("tensors_listed", &Coverage::tensors_listed)
      .attribute("tensors_scanned", &Coverage::tensors_scanned)
      .attribute("bytes_scanned", &Coverage::bytes_scanned)
      .attribute("not_scanned", &Coverage::not_scanned)
      .attribute("num_opaque_types", [](const Coverage& self) { return self.num_opaque_types(); })
      .type()
      .def("reasons", &Coverage::reasons)
      .def("opaque", &Coverage::opaque);
  Bound<Call>(m, "Call")
      .attribute("module", &Call::module)
      .attribute("kind", &Call::kind)
      .attribute("order", &Call::order)
      .attribute("batch", &Call::batch)
      .attribute("thread", &Call::thread)
      .attribute("begins_after", &Call::begins_after)
      .attribute("ends_before", &Call::ends_before)
      .attribute("is_traced", &Call::is_traced)
      .attribute("has_unseen", &Call::has_unseen);
  // Returns references to its frames, not copies.
  py::class_<StepResults>(m, "StepResults")
      .def_readonly("before", &StepResults::before)
      .def_readonly("bad", &StepResults::bad)
      .def_property_readonly("captured_tensors", [](const StepResults& self) {
        return self.captured_tensors ? self.captured_tensors : py::none();
      });
}

}  // namespace

const char* name_of(Dtype dtype) { return kDtypeNames[static_cast<size_t>(dtype)]; }

void bind_records(py::module_& m) {
  bind_enums(m);
  bind_labels(m);
  bind_entry(m);
  bind_headroom(m);
  bind_frames(m);
}

}  // namespace overflow_fast
