// The text of errors, for entries that could not be scanned; errors as torch raises them.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

namespace overflow_fast {

// The message of the exception being handled, in one line. Rethrows an interrupt, which is meant
// for the user.
pybind11::str current_exception_text();

// A function for Python that raises errors of devices as the exceptions that torch makes of them.
template <class Function>
auto raises_as_torch(Function&& function) {
  return torch::wrap_pybind_function(std::forward<Function>(function));
}

}  // namespace overflow_fast
