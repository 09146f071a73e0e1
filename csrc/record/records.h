// The recorder's records for Python: copies with their labels written out, independent of what the
// recorder does next. They are created for reports and rules, not in hooks.
#pragma once

#include "../record/headroom.h"
#include "../record/underflow.h"

namespace overflow_fast {

// torch's name of a dtype, such as "float16".
const char* name_of(Dtype dtype);

// The stat of a slot, in numbers of its dtype. The extremes are None without elements, and both are
// nan if there is a nan: as in torch, a nan is any tensor's minimum and maximum.
py::object make_stat(const Slot& slot, Dtype dtype);

struct NamedPlace {
  Place place;
  Label label;
};

template <class Record>
struct Named {
  NamedPlace place;
  Record record;
};

inline NamedPlace named(const LabelTable& labels, const Place& place, Role role) {
  return {place, labels.label(place.label, role)};
}

void bind_stat(py::module_& m);
void bind_records(py::module_& m);
void bind_rows(py::module_& m);
void bind_recorder(py::module_& m);

}  // namespace overflow_fast
