// Holds what a call without autograd is given, so that it can be made again. A token of a small
// model takes milliseconds: the lists and dicts below its arguments, such as those of a cache, are
// copied here in one pass, and none of their classes' own code runs.
#include "held_values.h"

#include <deque>

#include "../record/containers.h"
#include "../torch_internals/python_tensor.h"
#include "../torch_internals/tensor_state.h"

namespace overflow_fast {

namespace py = pybind11;

namespace {

constexpr size_t kMost = 512;  // containers that are opened; chosen, not measured

class HeldValues {
 public:
  // Values that are as small as this, of one dimension at most, are listed: counters, such as the
  // length of a cache.
  HeldValues(const py::sequence& values, int64_t small) : small_(small) {
    for (const py::object each : values) waiting_.push_back(each.ptr());
    while (!waiting_.empty()) {
      PyObject* const value = waiting_.front();
      waiting_.pop_front();
      if (!is_common_plain(value)) visit(value);
    }
  }

  py::list containers() const { return containers_; }
  py::list items() const { return items_; }
  py::list tensors() const { return tensors_; }
  py::list versions() const { return versions_; }
  py::list counters() const { return counters_; }

 private:
  void visit(PyObject* value) {
    const TypeLayout& layout = layout_of(value);
    if (layout.shape == Shape::kTensor) return note(value);
    if (!is_container(layout.shape)) return;
    if (num_opened_ == kMost || !opened_.add(value)) return;
    ++num_opened_;
    if (layout.shape == Shape::kSequence) {
      PyTuple_Check(value) ? wait_for(value) : hold(value, PySequence_List(value));
    } else if (PyDict_Check(value)) {
      hold(value, PyDict_CheckExact(value) ? PyDict_Copy(value) : copy_of(value));
    } else if (layout.has_dict && Py_TYPE(value)->tp_call == nullptr) {
      const auto attributes =
          py::reinterpret_steal<py::object>(PyObject_GenericGetDict(value, nullptr));
      if (attributes) return hold(attributes.ptr(), PyDict_Copy(attributes.ptr()));
      PyErr_Clear();
    }
  }

  // That of a subclass, which may have an order of its own.
  static PyObject* copy_of(PyObject* dict) {
    PyObject* const copy = PyDict_New();
    if (copy != nullptr && PyDict_Update(copy, dict) == 0) return copy;
    Py_XDECREF(copy);
    return nullptr;
  }

  void note(PyObject* value) {
    const at::Tensor& tensor = tensor_of(value);
    tensors_.append(py::handle(value));
    versions_.append(version_of(tensor).value_or(0));
    if (is_plain_tensor(value) && tensor.dim() < 2 && tensor.numel() <= small_) {
      counters_.append(py::handle(value));
    }
  }

  // Takes a new reference to the items.
  void hold(PyObject* container, PyObject* copied) {
    const auto items = py::reinterpret_steal<py::object>(copied);
    if (!items) throw py::error_already_set();
    containers_.append(py::handle(container));
    items_.append(items);
    if (PyList_Check(items.ptr())) return wait_for(items.ptr());
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(items.ptr(), &position, &key, &value)) waiting_.push_back(value);
  }

  void wait_for(PyObject* sequence) {
    PyObject** const items = PySequence_Fast_ITEMS(sequence);
    waiting_.insert(waiting_.end(), items, items + PySequence_Fast_GET_SIZE(sequence));
  }

  int64_t small_;
  std::deque<PyObject*> waiting_;  // what holds them is held
  Opened opened_;
  size_t num_opened_ = 0;
  py::list containers_, items_, tensors_, versions_, counters_;
};

}  // namespace

void bind_held_values(py::module_& m) {
  py::class_<HeldValues>(m, "HeldValues")
      .def(py::init<const py::sequence&, int64_t>(), py::arg("values"), py::arg("small"))
      .def_property_readonly("containers", &HeldValues::containers)
      .def_property_readonly("items", &HeldValues::items)
      .def_property_readonly("tensors", &HeldValues::tensors)
      .def_property_readonly("versions", &HeldValues::versions)
      .def_property_readonly("counters", &HeldValues::counters);
}

}  // namespace overflow_fast
