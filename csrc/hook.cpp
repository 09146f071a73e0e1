#include "hook.h"

#include <structmember.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstddef>

#include "errors.h"
#include "recorder.h"
#include "walk.h"

namespace overflow_fast {

namespace {

constexpr long kRecomputed = 1;
constexpr long kEndsStep = 2;

struct FrameHook {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* owner;
  PyObject* recorder_object;  // keeps `recorder` alive
  Recorder* recorder;
  uint32_t module;
};

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

void record(FrameHook* self, PyObject* module, PyObject* args, PyObject* kwargs, PyObject* output) {
  Recorder& recorder = recorder_of(self);
  std::optional<Stopwatch> watch;
  if (recorder.options().gathers) watch.emplace(recorder.seconds);
  long flags = 0;
  if (!recorder.in_step) {
    flags = py::handle(self->owner)
                .attr("on_unrooted")(self->module, torch::autograd::get_current_graph_task_id())
                .cast<long>();
  }
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(module));
  const bool wants_tensors = recorder.wants_tensors();
  Frame frame = recorder.begin_frame(self->module, py::reinterpret_borrow<py::object>(type),
                                     flags & kRecomputed ? Phase::kRecomputed : Phase::kForward);
  if (recorder.options().lists_parameters) {
    guarded(recorder, frame, kParametersLabel, [&] { record_parameters(recorder, frame, module); });
  }
  if (recorder.options().lists_calls) {
    guarded(recorder, frame, kInputLabel, [&] { record_inputs(recorder, frame, args, kwargs); });
    guarded(recorder, frame, kOutputLabel, [&] { record_outputs(recorder, frame, output); });
  }
  const bool wants_attention = recorder.finish(frame);
  if (wants_tensors) {
    recorder.hold(py::make_tuple(py::reinterpret_borrow<py::object>(args),
                                 py::reinterpret_borrow<py::object>(kwargs),
                                 py::reinterpret_borrow<py::object>(output)));
  }
  if (wants_attention) py::handle(self->owner).attr("on_frame")(std::move(frame));
  if (recorder.should_fetch()) py::handle(self->owner).attr("on_waiting")();
  if (flags & kEndsStep) py::handle(self->owner).attr("on_unrooted_end")();
}

PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  if (nargs != 4 || kwnames != nullptr) {
    PyErr_Format(PyExc_TypeError,
                 "FrameHook takes module, args, kwargs and output, got %zd arguments", nargs);
    return nullptr;
  }
  try {
    record(reinterpret_cast<FrameHook*>(self), args[0], args[1], args[2], args[3]);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
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
  self->vectorcall = call;
  Py_INCREF(owner);
  self->owner = owner;
  self->recorder_object = nullptr;
  self->recorder = nullptr;
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
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FrameHook, vectorcall), READONLY, nullptr},
    {"owner", T_OBJECT, offsetof(FrameHook, owner), READONLY, "Who is told of bad frames."},
    {"module", T_UINT, offsetof(FrameHook, module), READONLY, "The index of its module."},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, kMethods},
    {Py_tp_members, kMembers},
    {0, nullptr},
};

PyType_Spec kSpec = {"overflow_fast._C.FrameHook", sizeof(FrameHook), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, kSlots};

}  // namespace

void add_frame_hook(py::module_& m) {
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&kSpec));
  if (!type) throw py::error_already_set();
  m.add_object("FrameHook", type);
}

}  // namespace overflow_fast
