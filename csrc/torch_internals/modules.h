// The layouts of classes and of nn.Module. Attribute access through an object itself could run the
// user's code.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string_view>
#include <utility>

namespace overflow_fast {

// An attribute of an object's class or its bases, borrowed, or null. CPython's own lookup,
// the only one that takes no reference, runs no descriptor and raises nothing.
inline PyObject* class_attribute(PyTypeObject* type, PyObject* name) {
  return _PyType_Lookup(type, name);
}

// An attribute of a class itself, borrowed, or null.
inline PyObject* own_attribute(PyTypeObject* type, PyObject* name) {
#if PY_VERSION_HEX >= 0x030c0000
  const auto attributes = pybind11::reinterpret_steal<pybind11::object>(PyType_GetDict(type));
  return PyDict_GetItem(attributes.ptr(), name);
#else
  return PyDict_GetItem(type->tp_dict, name);
#endif
}

// True if a weak reference still refers to an object.
inline bool refers_to(PyObject* reference, PyObject* object) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* found = nullptr;
  PyWeakref_GetRef(reference, &found);
  Py_XDECREF(found);
  return found == object;
#else
  return PyWeakref_GET_OBJECT(reference) == object;
#endif
}

// The dict of the parameters that a module itself holds (nn.Module._parameters).
inline pybind11::object own_parameters(PyObject* module) {
  static PyObject* const kName = PyUnicode_InternFromString("_parameters");
  // Bypasses nn.Module's __getattr__, which is the fallback.
  PyObject* found = PyObject_GenericGetAttr(module, kName);
  if (found == nullptr) {
    PyErr_Clear();
    found = PyObject_GetAttr(module, kName);
  }
  if (found == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(found);
}

// FSDP2 and composable replicate() derive a module's class from theirs and the author's, and put a
// prefix before the author's name. The classes are recognised by their names, so that
// nothing imports them.
inline PyTypeObject* unwrapped_type(PyTypeObject* type) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kComposed = {
      {{"DDP", "DDP"}, {"FSDPModule", "FSDP"}, {"ReplicateModule", "Replicate"}}};
  const auto base = [type](Py_ssize_t place) {
    return reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, place));
  };
  const Py_ssize_t num_bases = PyTuple_GET_SIZE(type->tp_mro);
  if (num_bases < 3) return type;
  for (const auto& [theirs, prefix] : kComposed) {
    if (theirs != base(1)->tp_name) continue;
    std::string_view name = type->tp_name;
    if (name.substr(0, prefix.size()) != prefix) continue;
    name.remove_prefix(prefix.size());
    for (Py_ssize_t place = 2; place < num_bases; ++place)
      if (name == base(place)->tp_name) return base(place);
  }
  return type;
}

}  // namespace overflow_fast
