// A slot as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

#include "stat.h"

namespace overflow_fast {

namespace py = pybind11;

inline py::object key_number(const DtypeInfo& info, uint64_t key) {
  if (info.is_integer()) return py::int_(key);
  return py::float_(decode_key(info, key));
}

// (abs_min, abs_max, num_nan, num_inf). abs_min and abs_max are None where there is no element,
// and both are nan where there is a nan: as in torch, a nan is any tensor's minimum and maximum.
inline py::tuple stat_tuple(const Slot& slot, Dtype dtype) {
  const DtypeInfo& info = dtype_info(dtype);
  if (slot.is_empty()) return py::make_tuple(py::none(), py::none(), 0, 0);
  const bool is_nan = slot.max_key >= info.first_nan && info.first_nan != kNoKey;
  return py::make_tuple(key_number(info, is_nan ? info.first_nan : slot.min_key),
                        key_number(info, is_nan ? info.first_nan : slot.max_key), slot.num_nan,
                        slot.num_inf());
}

}  // namespace overflow_fast
