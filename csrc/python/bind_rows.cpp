// The rows of a flight record as Python classes.
#include <pybind11/stl.h>

#include "../record/recorder.h"
#include "../record/records.h"
#include "bound.h"

namespace overflow_fast {

namespace {

template <std::string (StepRows::Row::*column)() const>
py::bytes bytes_of(const StepRows::Row& row) {
  return py::bytes((row.*column)());
}

py::object zeros_of(const StepRows::Row& row) {
  return row.zeros.empty() ? py::object(py::none()) : py::object(py::bytes(row.num_zero()));
}

py::object saturated_of(const StepRows::Row& row) {
  if (row.saturated.empty()) return py::none();
  return py::bytes(row.num_saturated());
}

}  // namespace

void bind_rows(py::module_& m) {
  Bound<Named<StepRows::Column>>(m, "RowColumn")
      .attribute("place", &Named<StepRows::Column>::place)
      .attribute("dtype", [](const StepRows::Column& self) { return name_of(self.dtype); })
      .attribute("numel", &StepRows::Column::numel)
      .attribute("limit", &StepRows::Column::limit);
  Bound<StepRows::Row>(m, "StepRow")
      .attribute("number", &StepRows::Row::number)
      .attribute("num_entries", [](const StepRows::Row& self) { return self.slots.size(); })
      .attribute("num_left_out", &StepRows::Row::num_left_out)
      .attribute("abs_min", &bytes_of<&StepRows::Row::abs_min>)
      .attribute("abs_max", &bytes_of<&StepRows::Row::abs_max>)
      .attribute("num_nan", &bytes_of<&StepRows::Row::num_nan>)
      .attribute("num_inf", &bytes_of<&StepRows::Row::num_inf>)
      .attribute("num_tensors", &bytes_of<&StepRows::Row::num_tensors>)
      .attribute("num_zero", zeros_of)
      .attribute("num_saturated", saturated_of);
}

}  // namespace overflow_fast
