// Sees what the code of one thread is about to call, and lets Python refuse it.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

void bind_call_watch(pybind11::module_& m);

}  // namespace overflow_fast
