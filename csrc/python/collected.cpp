#include "collected.h"

#include <pybind11/stl.h>

#include <unordered_set>
#include <vector>

namespace overflow_fast {

namespace py = pybind11;

namespace {

// Calls a function with each object that the collector knows. It must run no Python code: where
// another thread makes a tuple from a generator, that fails while anybody else holds the tuple, as
// the list of all objects does.
template <typename Function>
void for_each_collected(const Function& function) {
  const py::list objects = py::module_::import("gc").attr("get_objects")();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects.ptr()); ++i) {
    function(PyList_GET_ITEM(objects.ptr(), i));
  }
}

// The objects, none of them a tuple, that the collector knows and whose type is kept.
std::vector<py::object> collected(const py::function& is_kept) {
  std::unordered_set<PyTypeObject*> seen;
  std::vector<py::object> types;
  for_each_collected([&](PyObject* object) {
    if (PyTuple_CheckExact(object) || !seen.insert(Py_TYPE(object)).second) return;
    types.push_back(py::reinterpret_borrow<py::object>(py::type::handle_of(object)));
  });
  std::unordered_set<PyTypeObject*> kept;
  for (const py::object& type : types) {
    if (py::bool_(is_kept(type))) kept.insert(reinterpret_cast<PyTypeObject*>(type.ptr()));
  }
  std::vector<py::object> found;
  for_each_collected([&](PyObject* object) {
    if (kept.count(Py_TYPE(object)) == 0) return;
    found.push_back(py::reinterpret_borrow<py::object>(object));
  });
  return found;
}

}  // namespace

void bind_collected(py::module_& m) { m.def("collected", &collected, py::arg("is_kept")); }

}  // namespace overflow_fast
