// FrameHook as a Python type, and the handle tensors of hooks.
#include <ATen/ATen.h>
#include <Python.h>
#include <c10/core/InferenceMode.h>
#include <structmember.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <unordered_map>

#include "../torch_internals/eval_frame.h"
#include "../torch_internals/no_dispatch_guard.h"
#include "../torch_internals/python_tensor.h"
#include "hook.h"

namespace overflow_fast {

namespace {

PyTypeObject* hook_type = nullptr;

// Hooks by the address of their handle tensors, which identify them in compiled code.
std::unordered_map<const void*, FrameHook*>& hooks() {
  static auto* const by_handle = new std::unordered_map<const void*, FrameHook*>;
  return *by_handle;
}

at::Tensor make_handle_tensor(const at::Device& device) {
  const NoDispatchGuard no_dispatch;
  const c10::InferenceMode normal(false);
  return at::zeros({1}, at::TensorOptions().dtype(at::kLong).device(device));
}

at::Device device_of(FrameHook* self) {
  const auto device = py::handle(self->owner).attr("device");
  return device.is_none() ? at::Device(at::kCPU) : device.cast<at::Device>();
}

// Creates the tensor when the hook is first traced.
const at::Tensor& handle_tensor_of(FrameHook* self) {
  if (self->handle_tensor == nullptr) {
    const EvalFramePause pause;
    self->handle_tensor = to_python(make_handle_tensor(device_of(self))).release().ptr();
    hooks()[tensor_of(self->handle_tensor).const_data_ptr()] = self;
  }
  return tensor_of(self->handle_tensor);
}

void forget_handle_tensor(FrameHook* self) {
  if (self->handle_tensor == nullptr) return;
  hooks().erase(tensor_of(self->handle_tensor).const_data_ptr());
  Py_CLEAR(self->handle_tensor);
}

template <class Get>
PyObject* guarded_get(Get get) {
  try {
    return get();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* get_handle_tensor(PyObject* object, void*) {
  return guarded_get([&] {
    auto* self = reinterpret_cast<FrameHook*>(object);
    handle_tensor_of(self);
    Py_INCREF(self->handle_tensor);
    return self->handle_tensor;
  });
}

PyObject* get_owner_handle(PyObject* object, void*) {
  return guarded_get([&]() -> PyObject* {
    const auto root_hook =
        py::handle(reinterpret_cast<FrameHook*>(object)->owner).attr("root_hook");
    return get_handle_tensor(root_hook.ptr(), nullptr);
  });
}

PyObject* get_plan(PyObject* object, void*) {
  return PyObject_GetAttrString(reinterpret_cast<FrameHook*>(object)->owner, "plan");
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject* owner;
  unsigned int module;
  static const char* names[] = {"owner", "module", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OI", const_cast<char**>(names), &owner,
                                   &module)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<FrameHook*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  Py_INCREF(owner);
  self->owner = owner;
  self->recorder_object = nullptr;
  self->recorder = nullptr;
  self->handle_tensor = nullptr;
  self->module = module;
  return reinterpret_cast<PyObject*>(self);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<FrameHook*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->owner);
  Py_VISIT(self->recorder_object);
  return 0;
}

int clear(PyObject* object) {
  auto* self = reinterpret_cast<FrameHook*>(object);
  forget_handle_tensor(self);
  Py_CLEAR(self->owner);
  self->recorder = nullptr;
  Py_CLEAR(self->recorder_object);
  return 0;
}

void destroy(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* reduce(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<FrameHook*>(object);
  return Py_BuildValue("O(OI)", Py_TYPE(object), self->owner, self->module);
}

PyMethodDef kMethods[] = {
    {"__reduce__", reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef kMembers[] = {
    {"owner", T_OBJECT, offsetof(FrameHook, owner), READONLY,
     "The object that bad frames are passed to."},
    {"module", T_UINT, offsetof(FrameHook, module), READONLY, "The index of its module."},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef kGetters[] = {
    {"handle_tensor", get_handle_tensor, nullptr,
     "The tensor that identifies the hook in compiled code.", nullptr},
    {"owner_handle", get_owner_handle, nullptr,
     "The tensor that identifies its owner in compiled code.", nullptr},
    {"plan", get_plan, nullptr,
     "The plan of what its owner lists: see overflow_fast.capture.compiled.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_methods, kMethods},
    {Py_tp_members, kMembers},
    {Py_tp_getset, kGetters},
    {0, nullptr},
};

PyType_Spec kSpec = {"overflow_fast._C.FrameHook", sizeof(FrameHook), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots};

}  // namespace

Recorder& recorder_of(FrameHook* self) {
  if (self->recorder == nullptr) {
    py::object object = py::handle(self->owner).attr("recorder");
    self->recorder = object.cast<Recorder*>();
    self->recorder_object = object.release().ptr();
  }
  return *self->recorder;
}

FrameHook* find_hook(const at::Tensor& handle_tensor) {
  const auto found = hooks().find(handle_tensor.const_data_ptr());
  return found == hooks().end() ? nullptr : found->second;
}

bool is_frame_hook(PyObject* object) { return Py_TYPE(object) == hook_type; }

void add_frame_hook(py::module_& m) {
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&kSpec));
  if (!type) throw py::error_already_set();
  hook_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  m.add_object("FrameHook", type);
}

}  // namespace overflow_fast
