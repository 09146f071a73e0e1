#include "hook.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <structmember.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstring>
#include <unordered_map>

#include "errors.h"
#include "eval_frame.h"
#include "recorder.h"
#include "unseen.h"
#include "walk.h"

namespace overflow_fast {

namespace {

constexpr long kRecomputed = 1;
constexpr long kEndsStep = 2;

struct FrameHook {
  PyObject_HEAD
  PyObject* owner;
  PyObject* recorder_object;  // keeps `recorder` alive
  Recorder* recorder;
  PyObject* ticket;  // a tensor; null until the hook is traced
  uint32_t module;
};

PyObject* hook_type = nullptr;

// Asked for at the first call: a copied or unpickled hook is made before its owner is complete.
Recorder& recorder_of(FrameHook* self) {
  if (self->recorder == nullptr) {
    py::object object = py::handle(self->owner).attr("_recorder");
    self->recorder = object.cast<Recorder*>();
    self->recorder_object = object.release().ptr();
  }
  return *self->recorder;
}

// What cannot be walked becomes a line that says so: the watched program goes on.
template <class Walk>
void guarded(Recorder& recorder, Frame& frame, LabelId label, Walk walk) {
  try {
    walk();
  } catch (...) {
    recorder.add_not_scanned(frame, {label}, current_exception_text());
  }
}

// Calls a method of the hook's owner. Where torch.compile looks at every Python frame that begins,
// it is to leave ours alone.
template <class... Arguments>
py::object call_owner(FrameHook* self, const char* method, Arguments&&... arguments) {
  const EvalFramePause pause;
  return py::handle(self->owner).attr(method)(std::forward<Arguments>(arguments)...);
}

// Records the frame of a call. fill(frame) adds its entries, tensors() is what to hold if it is the
// first bad one.
template <class Fill, class Tensors>
void record_call(FrameHook* self, Recorder& recorder, py::object class_name, Fill fill,
                 Tensors tensors) {
  std::optional<Stopwatch> watch;
  if (recorder.options().gathers) watch.emplace(recorder.seconds);
  long flags = 0;
  if (!recorder.in_step) {
    const int64_t graph_task = torch::autograd::get_current_graph_task_id();
    flags = call_owner(self, "on_unrooted", self->module, graph_task).template cast<long>();
  }
  const bool wants_tensors = recorder.wants_tensors();
  Frame frame = recorder.begin_frame(self->module, std::move(class_name),
                                     flags & kRecomputed ? Phase::kRecomputed : Phase::kForward);
  fill(frame);
  const bool wants_attention = recorder.finish(frame);
  if (wants_tensors && recorder.is_bad()) recorder.hold(tensors());
  if (wants_attention) call_owner(self, "on_frame", std::move(frame));
  if (recorder.should_fetch()) call_owner(self, "on_waiting");
  if (flags & kEndsStep) call_owner(self, "on_unrooted_end");
}

// FSDP2 gives a module a class of its own: (FSDPModule, the author's).
PyTypeObject* authors_type(PyTypeObject* type) {
  if (std::strncmp(type->tp_name, "FSDP", 4) != 0 || PyTuple_GET_SIZE(type->tp_mro) < 3) return type;
  auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, 1));
  if (std::strcmp(base->tp_name, "FSDPModule") != 0) return type;
  return reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, 2));
}

py::object class_name_of(PyObject* module) {
  PyTypeObject* type = authors_type(Py_TYPE(module));
  if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0) return py::str(type->tp_name);
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyHeapTypeObject*>(type)->ht_name);
}

void record(FrameHook* self, PyObject* module, PyObject* args, PyObject* kwargs, PyObject* output) {
  Recorder& recorder = recorder_of(self);
  if (recorder.is_paused) return;
  const auto fill = [&](Frame& frame) {
    if (recorder.lists_parameters) {
      guarded(recorder, frame, kParametersLabel,
              [&] { record_parameters(recorder, frame, module); });
    }
    if (recorder.options().lists_calls) {
      guarded(recorder, frame, kInputLabel, [&] { record_inputs(recorder, frame, args, kwargs); });
      guarded(recorder, frame, kOutputLabel, [&] { record_outputs(recorder, frame, output); });
    }
  };
  const auto tensors = [&]() -> py::object {
    return py::make_tuple(py::reinterpret_borrow<py::object>(args),
                          py::reinterpret_borrow<py::object>(kwargs),
                          py::reinterpret_borrow<py::object>(output));
  };
  record_call(self, recorder, class_name_of(module), fill, tensors);
}

void record_traced_frame(FrameHook* self, Recorder& recorder, const TracedCall& call,
                         at::TensorList tensors) {
  // The compiled code will write to them.
  const auto copies = [&]() -> py::object {
    py::list list;
    for (const at::Tensor& tensor : tensors) list.append(tensor.detach().clone());
    return std::move(list);
  };
  const auto fill = [&](Frame& frame) { recorder.add_traced(frame, call, tensors); };
  if (call.phase == Phase::kForward) {
    return record_call(self, recorder, call.class_name, fill, copies);
  }
  if (call.phase == Phase::kBackward && !recorder.wants_gradients()) return;
  const Stopwatch watch(recorder.seconds);
  const bool wants_tensors = recorder.wants_tensors();
  Frame frame = recorder.begin_frame(self->module, call.class_name, call.phase);
  fill(frame);
  recorder.finish(frame);
  if (wants_tensors && recorder.is_bad()) recorder.hold(copies());
}

// run_hook(hook, module, args, kwargs, output): what torch calls after a module's forward.
PyObject* run_hook(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 5 || Py_TYPE(args[0]) != reinterpret_cast<PyTypeObject*>(hook_type)) {
    PyErr_Format(PyExc_TypeError,
                 "run_hook takes a FrameHook, module, args, kwargs and output, got %zd arguments",
                 nargs);
    return nullptr;
  }
  try {
    record(reinterpret_cast<FrameHook*>(args[0]), args[1], args[2], args[3], args[4]);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// run_paused(function, *args): calls it while torch.compile leaves Python frames alone.
PyObject* run_paused(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs == 0) {
    PyErr_SetString(PyExc_TypeError, "run_paused takes a function");
    return nullptr;
  }
  const EvalFramePause pause;
  return PyObject_Vectorcall(args[0], args + 1, nargs - 1, nullptr);
}

// Hooks by the address of their tickets: what compiled code knows them by.
std::unordered_map<const void*, FrameHook*>& hooks() {
  static auto* const by_ticket = new std::unordered_map<const void*, FrameHook*>;
  return *by_ticket;
}

at::Tensor make_ticket(const at::Device& device) {
  const Unseen unseen;
  const c10::InferenceMode normal(false);
  return at::zeros({1}, at::TensorOptions().dtype(at::kLong).device(device));
}

at::Device device_of(FrameHook* self) {
  const auto device = py::handle(self->owner).attr("device");
  return device.is_none() ? at::Device(at::kCPU)
                          : reinterpret_cast<THPDevice*>(device.cast<py::object>().ptr())->device;
}

// Made when a hook is first traced.
const at::Tensor& ticket_of(FrameHook* self) {
  if (self->ticket == nullptr) {
    const EvalFramePause pause;
    self->ticket = THPVariable_Wrap(make_ticket(device_of(self)));
    if (self->ticket == nullptr) throw py::error_already_set();
    hooks()[THPVariable_Unpack(self->ticket).const_data_ptr()] = self;
  }
  return THPVariable_Unpack(self->ticket);
}

void forget_ticket(FrameHook* self) {
  if (self->ticket == nullptr) return;
  hooks().erase(THPVariable_Unpack(self->ticket).const_data_ptr());
  Py_CLEAR(self->ticket);
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

PyObject* get_ticket(PyObject* object, void*) {
  return guarded_get([&] {
    auto* self = reinterpret_cast<FrameHook*>(object);
    ticket_of(self);
    Py_INCREF(self->ticket);
    return self->ticket;
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
  self->ticket = nullptr;
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
  forget_ticket(self);
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
    {"owner", T_OBJECT, offsetof(FrameHook, owner), READONLY, "Who is told of bad frames."},
    {"module", T_UINT, offsetof(FrameHook, module), READONLY, "The index of its module."},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef kGetters[] = {
    {"ticket", get_ticket, nullptr, "A tensor that compiled code knows the hook by.", nullptr},
    {"plan", get_plan, nullptr, "What its owner lists: see overflow_fast.traced.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef kFunctions[] = {
    {"run_hook", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_hook)),
     METH_FASTCALL, "Records the frame of a call; for torch to call as a forward hook."},
    {"run_paused", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_paused)),
     METH_FASTCALL, "Calls a function that torch.compile is not to look at."},
    {nullptr, nullptr, 0, nullptr},
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

void record_traced(const at::Tensor& ticket, const std::string& text, at::TensorList tensors) {
  const py::gil_scoped_acquire gil;
  const auto found = hooks().find(ticket.const_data_ptr());
  if (found == hooks().end()) return;  // the hook has died, and nobody asks any more
  FrameHook* self = found->second;
  const auto alive = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(self));
  Recorder& recorder = recorder_of(self);
  if (recorder.is_paused) return;
  const TracedCall& call = recorder.traced_call(text);
  try {
    if (call.has_frame) record_traced_frame(self, recorder, call, tensors);
  } catch (...) {
    call_owner(self, "on_traced_raised", call.is_root);
    throw;
  }
  if (call.is_root) call_owner(self, "on_traced_root", call.has_loss);
}

void call_traced(const at::Tensor& ticket, const std::string& method) {
  const py::gil_scoped_acquire gil;
  const auto found = hooks().find(ticket.const_data_ptr());
  if (found == hooks().end()) return;
  FrameHook* self = found->second;
  const auto alive = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(self));
  if (!recorder_of(self).is_paused) call_owner(self, method.c_str());
}

void add_frame_hook(py::module_& m) {
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&kSpec));
  if (!type) throw py::error_already_set();
  hook_type = type.ptr();
  m.add_object("FrameHook", type);
  if (PyModule_AddFunctions(m.ptr(), kFunctions) != 0) throw py::error_already_set();
}

}  // namespace overflow_fast
