// Errors as the entries that could not be scanned tell them.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

// What the exception being handled says, in one line. Rethrows what must not be held up: an
// interrupt is the user's.
pybind11::str current_exception_text();

}  // namespace overflow_fast
