// The recorder as a Python class.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../record/recorder.h"
#include "../record/records.h"
#include "../torch_internals/errors.h"

namespace overflow_fast {

namespace {

Options options_of(const py::kwargs& kwargs) {
  static const std::unordered_map<std::string, bool Options::*> kByName = {
      {"strict_compat", &Options::strict_compat},
      {"list_kwargs", &Options::list_kwargs},
      {"memo", &Options::use_memo},
      {"defer", &Options::defer},
      {"fetch_frames", &Options::fetch_frames},
      {"step_mode", &Options::step_mode},
      {"lists_parameters", &Options::lists_parameters},
      {"lists_calls", &Options::lists_calls},
      {"parameters_once", &Options::parameters_once},
      {"watches_gradients", &Options::watches_gradients},
      {"captures_tensors", &Options::captures_tensors},
  };
  Options options;
  for (const auto& [name, value] : kwargs) {
    const auto found = kByName.find(name.cast<std::string>());
    if (found == kByName.end()) {
      throw py::type_error("Recorder has no option " + name.cast<std::string>());
    }
    options.*found->second = value.cast<bool>();
  }
  return options;
}

NamedPlace named_in(const Recorder& recorder, const Place& place) {
  return named(recorder.labels(), place, recorder.role_of(place.kind, place.label));
}

std::vector<Named<Entry>> entries_of(const Recorder& recorder, const Frame& frame) {
  std::vector<Named<Entry>> entries;
  entries.reserve(frame.entries.size());
  for (const Entry& entry : frame.entries) {
    const Place place{frame.kind, frame.module, entry.listing.label};
    entries.push_back({named(recorder.labels(), place, entry.listing.role), entry});
  }
  return entries;
}

using NamedPeak = Named<Headroom::Peak>;
using NamedHistory = Named<Headroom::History>;

std::optional<NamedPeak> least_headroom(Recorder& recorder) {
  const auto& peak = recorder.headroom().least();
  if (!peak) return std::nullopt;
  return NamedPeak{named_in(recorder, peak->place), *peak};
}

// The last finite peak of an entry's place.
std::optional<NamedPeak> last_peak(Recorder& recorder, const NamedPlace& place) {
  const auto* history = recorder.headroom().find(place.place);
  if (history == nullptr) return std::nullopt;
  return NamedPeak{place, history->last};
}

NamedHistory named_history(const Recorder& recorder, const Headroom::History& history) {
  return {named_in(recorder, history.last.place), history};
}

std::vector<NamedHistory> low_headroom(Recorder& recorder) {
  std::vector<NamedHistory> low;
  for (const Place& place : recorder.headroom().low()) {
    const auto* history = recorder.headroom().find(place);
    if (history != nullptr) low.push_back(named_history(recorder, *history));
  }
  return low;
}

std::vector<NamedHistory> all_headroom(Recorder& recorder) {
  std::vector<NamedHistory> all;
  for (const auto& [_, history] : recorder.headroom().histories()) {
    all.push_back(named_history(recorder, history));
  }
  return all;
}

std::vector<Named<Underflow::Counts>> take_underflow(Recorder& recorder) {
  std::vector<Named<Underflow::Counts>> taken;
  for (const Underflow::Counts& counts : recorder.take_underflow()) {
    taken.push_back({named_in(recorder, counts.place), counts});
  }
  return taken;
}

// The columns of its rows from one on.
std::vector<Named<StepRows::Column>> row_columns(Recorder& recorder, size_t first) {
  const std::vector<StepRows::Column>& all = recorder.rows().columns();
  std::vector<Named<StepRows::Column>> columns;
  for (size_t i = first; i < all.size(); ++i) {
    columns.push_back({named_in(recorder, all[i].place), all[i]});
  }
  return columns;
}

}  // namespace

void bind_recorder(py::module_& m) {
  py::class_<Recorder>(m, "Recorder")
      .def(py::init([](std::optional<int64_t> max_frames, const py::kwargs& options) {
             return std::make_unique<Recorder>(max_frames, options_of(options));
           }),
           py::arg("max_frames"))
      .def_readwrite("max_frames", &Recorder::max_frames)
      .def_property("in_step", &Recorder::in_step, &Recorder::set_in_step)
      .def_property("is_evaluation", &Recorder::is_evaluation, &Recorder::set_is_evaluation)
      .def_readwrite("lists_parameters", &Recorder::lists_parameters)
      .def_readwrite("is_paused", &Recorder::is_paused)
      .def_property_readonly("is_off", &Recorder::is_off)
      .def("note_depth", &Recorder::note_depth)
      .def_readwrite("watches_every_frame", &Recorder::watches_every_frame)
      .def_readwrite("total_calls", &Recorder::total_calls)
      .def_property_readonly("coverage", &Recorder::coverage)
      .def_property_readonly("num_syncs", &Recorder::num_syncs)
      .def_property_readonly("num_sends", &Recorder::num_sends)
      .def_static("num_frames", &Recorder::num_frames)
      .def_property_readonly("last_batch", &Recorder::last_batch)
      .def("entries", &entries_of, py::arg("frame"))
      .def("calls", &Recorder::calls)
      .def("forget_calls", &Recorder::forget_calls)
      .def("history",
           [](const Recorder& self) {
             return std::vector<Frame>(self.history().begin(), self.history().end());
           })
      .def("clear_history", [](Recorder& self) { self.history().clear(); })
      .def("send", &Recorder::send, py::arg("with_captured") = false)
      .def("want_flags", &Recorder::want_flags)
      .def("take_flags", &Recorder::take_flags)
      .def("process_arrived", &Recorder::process_arrived, py::arg("max_in_flight"),
           py::arg("on_batch"), py::arg("on_frame"))
      .def("keep", [](Recorder& self, const Frame& frame) { self.keep(Frame(frame)); })
      .def("record", &Recorder::record, py::arg("kind"), py::arg("names"), py::arg("tensors"))
      .def("record_output", &Recorder::record_output, py::arg("batch"), py::arg("names"),
           py::arg("tensors"))
      .def("scan_failed", py::overload_cast<const py::object&>(&Recorder::scan_failed),
           py::arg("find"))
      .def("raise_lost", raises_as_torch([](Recorder& self) { self.raise_lost(); }))
      .def("set_gradients_wanted", &Recorder::set_gradients_wanted)
      .def("take_step_results", &Recorder::take_step_results)
      .def("forget_parameters", &Recorder::forget_parameters)
      .def("forget_parameters_but_of", &Recorder::forget_parameters_but_of, py::arg("batch"))
      .def_readwrite("counts_underflow", &Recorder::counts_underflow)
      .def_property_readonly("has_counts", &Recorder::has_counts)
      .def("take_underflow", &take_underflow)
      .def("keep_rows", [](Recorder& self) { self.rows().is_on = self.rows().is_kept = true; })
      .def("note_row", [](Recorder& self) { self.rows().is_on = true; })
      .def("restart_row", [](Recorder& self) { self.rows().restart(); })
      .def("running_row", [](Recorder& self) { return self.rows().running(); })
      .def("end_row", [](Recorder& self,
                         int64_t number) { self.rows().end_step(number, Recorder::num_frames()); })
      .def_property_readonly("has_row", &Recorder::has_row)
      .def("take_row", [](Recorder& self) { return self.rows().take(); })
      .def("row_columns", &row_columns, py::arg("first"))
      .def("set_rules", [](Recorder& self, py::object rules) { self.rules().set(rules); })
      .def("begin_headroom", [](Recorder& self) { self.headroom().begin_step(); })
      .def_property_readonly("is_headroom_spent",
                             [](Recorder& self) { return self.headroom().is_spent(); })
      .def("set_low_headroom", [](Recorder& self, double bits) { self.headroom().set_low(bits); })
      .def("low_headroom", &low_headroom)
      .def("headroom", &all_headroom)
      .def("least_headroom", &least_headroom)
      .def("last_peak", &last_peak)
      .def_property_readonly("largest_gradient",
                             [](Recorder& self) { return self.headroom().largest_gradient(); })
      .def_property_readonly("num_zero_gradients",
                             [](Recorder& self) { return self.headroom().num_zero_gradients(); })
      .def_readwrite("seconds", &Recorder::seconds)
      .def("end_step", &Recorder::end_step)
      .def("begin_batch", &Recorder::begin_batch)
      .def("begin_apart", &Recorder::begin_apart)
      .def("end_apart", &Recorder::end_apart)
      .def("leave_out", &Recorder::leave_out);
}

}  // namespace overflow_fast
