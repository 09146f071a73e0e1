// The containers among a module's inputs and outputs that are searched for tensors: sequences,
// dicts, dataclasses.
#pragma once

#include <algorithm>
#include <vector>

#include "../torch_internals/modules.h"
#include "../torch_internals/python_tensor.h"
#include "labels.h"

namespace overflow_fast {

// Deeper containers are not opened.
constexpr int kMaxDepth = 16;
// Limits the children visited in one walk: containers may hold others many times over.
constexpr int kMaxChildren = 1 << 20;

enum class Shape : uint8_t { kTensor, kNone, kSequence, kDict, kAttributes, kLeaf };

// Dataclasses have their fields as attributes; one that is also a dict (ModelOutput) leaves out
// the fields that are None, so its items are listed instead.
inline bool is_dataclass(PyObject* object) {
  static PyObject* const kFields = PyUnicode_InternFromString("__dataclass_fields__");
  return class_attribute(Py_TYPE(object), kFields) != nullptr;
}

inline Shape shape_of(PyObject* object) {
  // The common cases first: for other objects the check for a tensor costs an isinstance().
  if (is_plain_tensor(object)) return Shape::kTensor;
  if (object == Py_None) return Shape::kNone;
  if (PyTuple_Check(object) || PyList_Check(object)) return Shape::kSequence;
  if (PyLong_CheckExact(object) || PyFloat_CheckExact(object) || PyBool_Check(object) ||
      PyUnicode_CheckExact(object)) {
    return Shape::kLeaf;
  }
  if (is_tensor(object)) return Shape::kTensor;
  if (PyDict_Check(object)) return Shape::kDict;
  if (!PyType_Check(object) && is_dataclass(object)) return Shape::kAttributes;
  return Shape::kLeaf;
}

inline bool is_container(Shape shape) {
  return shape == Shape::kSequence || shape == Shape::kDict || shape == Shape::kAttributes;
}

// Calls visit(style, key, index, child) for each child of a container. None of the user's code
// runs, but for properties in the place of a dataclass's fields.
template <class Visit>
void for_each_child(PyObject* object, Shape shape, Visit visit_borrowed) {
  // Large scans release the GIL, and another thread may drop the child meanwhile.
  const auto visit = [&](LabelStyle style, PyObject* key, Py_ssize_t index, PyObject* child) {
    const auto alive = py::reinterpret_borrow<py::object>(child);
    visit_borrowed(style, key, index, child);
  };
  if (shape == Shape::kSequence) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      visit(LabelStyle::kIndex, nullptr, i, PySequence_Fast_GET_ITEM(object, i));
    }
  } else if (shape == Shape::kDict) {
    const bool is_model_output = !PyDict_CheckExact(object) && is_dataclass(object);
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value)) {
      visit(is_model_output ? LabelStyle::kAttribute : LabelStyle::kKey, key, 0, value);
    }
  } else if (shape == Shape::kAttributes) {
    const auto fields =
        py::handle(reinterpret_cast<PyObject*>(Py_TYPE(object))).attr("__dataclass_fields__");
    for (const auto& name : py::reinterpret_borrow<py::dict>(fields)) {
      const auto value =
          py::reinterpret_steal<py::object>(PyObject_GenericGetAttr(object, name.first.ptr()));
      if (!value) {
        PyErr_Clear();
        continue;
      }
      visit(LabelStyle::kAttribute, name.first.ptr(), 0, value.ptr());
    }
  }
}

enum class Content : uint8_t { kNoTensor, kTooMuch, kTensor };

// The containers that a walk has open, from the outermost to the innermost.
class Opened {
 public:
  // Calls visit(style, key, index, child) for each child, unless the container is open already,
  // which is a cycle. Returns kTooMuch beyond kMaxChildren.
  template <class Visit>
  Content open(PyObject* object, Shape shape, Visit visit) {
    if (std::find(path_.begin(), path_.end(), object) != path_.end()) return Content::kNoTensor;
    bool is_over = false;
    path_.push_back(object);
    for_each_child(object, shape,
                   [&](LabelStyle style, PyObject* key, Py_ssize_t index, PyObject* child) {
                     is_over = is_over || ++num_children_ > kMaxChildren;
                     if (!is_over) visit(style, key, index, child);
                   });
    path_.pop_back();
    return is_over ? Content::kTooMuch : Content::kNoTensor;
  }

  Content content(PyObject* object, Shape shape, int depth) {
    if (shape == Shape::kTensor) return Content::kTensor;
    if (!is_container(shape)) return Content::kNoTensor;
    if (depth > kMaxDepth) return Content::kTooMuch;
    Content found = Content::kNoTensor;
    const Content whole =
        open(object, shape, [&](LabelStyle, PyObject*, Py_ssize_t, PyObject* child) {
          if (found != Content::kTensor) {
            found = std::max(found, content(child, shape_of(child), depth + 1));
          }
        });
    return std::max(found, whole);
  }

 private:
  std::vector<PyObject*> path_;
  int num_children_ = 0;
};

}  // namespace overflow_fast
