#include "errors.h"

#include <string>

namespace overflow_fast {

namespace py = pybind11;

namespace {

py::str first_line(const std::string& text) { return py::str(text.substr(0, text.find('\n'))); }

}  // namespace

py::str current_exception_text() {
  try {
    try {
      throw;
    } catch (const python_error&) {  // torch's: the error is still where Python keeps it
      throw py::error_already_set();
    }
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return py::str("{}: {}").format(error.type().attr("__name__"), error.value());
  } catch (const c10::Error& error) {
    return first_line(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return first_line(error.what());
  }
}

}  // namespace overflow_fast
