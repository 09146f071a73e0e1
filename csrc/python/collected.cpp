#include "collected.h"

#include <pybind11/stl.h>

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace overflow_fast {

namespace py = pybind11;

namespace {

// The types that a function of Python keeps, which is asked once for each.
class Types {
 public:
  explicit Types(py::function is_kept)
      : is_kept_(std::move(is_kept)),
        get_objects_(py::module_::import("gc").attr("get_objects")),
        youngest_(0) {}

  bool has(PyTypeObject* type) {
    const auto found = answers_.find(type);
    if (found != answers_.end()) return found->second;
    held_.push_back(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type)));
    const bool is_kept(py::bool_(is_kept_(held_.back())));
    return answers_.emplace(type, is_kept).first->second;
  }

  // The objects of them that the collector knows.
  std::vector<py::object> objects(bool is_young) {
    std::unordered_set<PyTypeObject*> seen;
    std::vector<py::object> unknown;
    for_each(is_young, [&](PyObject* object) {
      PyTypeObject* type = Py_TYPE(object);
      if (answers_.count(type) != 0 || !seen.insert(type).second) return;
      unknown.push_back(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type)));
    });
    for (const py::object& type : unknown) has(reinterpret_cast<PyTypeObject*>(type.ptr()));
    std::vector<py::object> found;
    for_each(is_young, [&](PyObject* object) {
      const auto answer = answers_.find(Py_TYPE(object));
      if (answer == answers_.end() || !answer->second) return;
      found.push_back(py::reinterpret_borrow<py::object>(object));
    });
    return found;
  }

 private:
  // Calls a function with each object, none of them a tuple, that the collector knows, or knows of
  // its youngest generation. It must run no Python code: where another thread makes a tuple from a
  // generator, that fails while anybody else holds the tuple, as the list of all objects does.
  template <typename Function>
  void for_each(bool is_young, const Function& function) {
    const py::list objects = is_young ? get_objects_(youngest_) : get_objects_();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects.ptr()); ++i) {
      PyObject* object = PyList_GET_ITEM(objects.ptr(), i);
      if (!PyTuple_CheckExact(object)) function(object);
    }
  }

  py::function is_kept_;
  py::object get_objects_;  // the code that runs when it is called may be unable to import
  py::int_ youngest_;
  std::unordered_map<PyTypeObject*, bool> answers_;
  std::vector<py::object> held_;  // the types, whose addresses stay theirs
};

std::vector<py::object> collected(py::function is_kept) {
  return Types(std::move(is_kept)).objects(/*is_young=*/false);
}

// Tells objects that existed when this was made from those made since, at no cost that grows with
// the program. What is made begins in the collector's youngest generation, which only a collection
// takes it from: what is there now, or was there when a collection began, is new, unless it was
// there when this was made. An address that was a new object's is never again an old one's.
//
// A generator that loses its last reference is put there once more, for it may run code that closes
// it: that code may go on, too.
class ObjectsBefore {
 public:
  explicit ObjectsBefore(py::function is_kept) : types_(std::move(is_kept)) {
    for (py::object& each : types_.objects(/*is_young=*/true)) {
      PyObject* address = each.ptr();
      young_.emplace(address, std::move(each));
    }
  }
  ObjectsBefore(const ObjectsBefore&) = delete;
  ObjectsBefore& operator=(const ObjectsBefore&) = delete;
  ~ObjectsBefore() = default;

  // False for what the collector does not know, and for what is not of the types.
  bool has(const py::object& value) {
    if (!types_.has(Py_TYPE(value.ptr())) || PyObject_GC_IsTracked(value.ptr()) == 0) return false;
    if (young_.count(value.ptr()) != 0) return true;
    if (made_.count(value.ptr()) != 0) return false;
    note_made();
    return made_.count(value.ptr()) == 0;
  }

  // One of `gc.callbacks`.
  void on_collection(const std::string& phase, const py::object&) {
    if (phase == "start") note_made();
  }

 private:
  void note_made() {
    for (const py::object& each : types_.objects(/*is_young=*/true)) {
      if (young_.count(each.ptr()) == 0) made_.insert(each.ptr());
    }
  }

  Types types_;
  // Those of when this was made, whose addresses stay theirs.
  std::unordered_map<PyObject*, py::object> young_;
  std::unordered_set<PyObject*> made_;
};

}  // namespace

void bind_collected(py::module_& m) {
  m.def("collected", &collected, py::arg("is_kept"));
  py::class_<ObjectsBefore>(m, "ObjectsBefore")
      .def(py::init<py::function>(), py::arg("is_kept"))
      .def("has", &ObjectsBefore::has, py::arg("value"))
      .def("on_collection", &ObjectsBefore::on_collection, py::arg("phase"), py::arg("info"));
}

}  // namespace overflow_fast
