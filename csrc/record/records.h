// What Python is handed of the recorder: records with their labels written out, which stay what
// they are whatever the recorder does next. They are made for a report or a rule, not in hooks.
#pragma once

#include "../record/headroom.h"
#include "../record/underflow.h"

namespace overflow_fast {

// torch's name of a dtype, such as "float16".
const char* name_of(Dtype dtype);

// A slot in the numbers of its dtype. There is no extreme where there is no element, and both are
// nan where there is a nan: as in torch, a nan is any tensor's minimum and maximum.
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
void bind_recorder(py::module_& m);

}  // namespace overflow_fast
