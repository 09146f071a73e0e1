// The text of errors, for entries that could not be scanned.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

// The message of the exception being handled, in one line. Rethrows an interrupt, which is meant
// for the user.
pybind11::str current_exception_text();

}  // namespace overflow_fast
