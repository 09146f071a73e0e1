// Tensors as Python objects. pybind's casts do the same, but look up a type and throw where an
// object is no tensor; a hook checks every value of every call.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

namespace overflow_fast {

// A torch.Tensor or nn.Parameter, of no subclass: compares two pointers.
inline bool is_plain_tensor(PyObject* object) { return THPVariable_CheckExact(object); }

// The same for any subclass. Costs an isinstance(), which may raise.
inline bool is_tensor(PyObject* object) { return THPVariable_Check(object); }

// The same for all objects of a type, without any code of it.
inline bool is_tensor_type(PyTypeObject* type) {
  return PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

// The tensor inside an object that is_tensor(). Lives as long as the object.
inline const at::Tensor& tensor_of(PyObject* object) { return THPVariable_Unpack(object); }

// The Python object of a tensor: the existing one, if it has one.
inline pybind11::object to_python(const at::Tensor& tensor) {
  PyObject* object = THPVariable_Wrap(tensor);
  if (object == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(object);
}

}  // namespace overflow_fast
