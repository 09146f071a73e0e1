#include "hook.h"

#include <ATen/ATen.h>

#include <utility>

#include "../record/walk.h"
#include "../torch_internals/autograd_graph.h"
#include "../torch_internals/errors.h"
#include "../torch_internals/eval_frame.h"
#include "../torch_internals/hidden.h"
#include "../torch_internals/modules.h"
#include "../torch_internals/python_tensor.h"
#include "../torch_internals/trace_mode.h"

namespace overflow_fast {

namespace {

constexpr long kRecomputed = 1;
constexpr long kEndsStep = 2;

// Calls walk(). If it throws, an entry with the error takes its place, and the watched program goes
// on.
template <class Walk>
void guarded(Recorder& recorder, Frame& frame, LabelId label, Walk walk) {
  try {
    walk();
  } catch (...) {
    recorder.add_not_scanned(frame, {label}, current_exception_text());
  }
}

// Calls a method of the hook's owner, with torch.compile's inspection of Python frames paused.
template <class... Arguments>
py::object call_owner(FrameHook* self, const char* method, Arguments&&... arguments) {
  const EvalFramePause pause;
  const Hidden hidden;
  return py::handle(self->owner).attr(method)(std::forward<Arguments>(arguments)...);
}

// Calls a method of the owner's `compiled_boundary` in the same way.
template <class... Arguments>
void call_root(FrameHook* self, const char* method, Arguments&&... arguments) {
  const EvalFramePause pause;
  const Hidden hidden;
  const py::object root = py::handle(self->owner).attr("compiled_boundary");
  root.attr(method)(std::forward<Arguments>(arguments)...);
}

// Records the frame of a call. fill(frame) adds its entries, tensors() returns what to capture if
// it is the first bad one.
template <class Fill, class Tensors>
void record_call(FrameHook* self, Recorder& recorder, py::object class_name, Fill fill,
                 Tensors tensors) {
  std::optional<Stopwatch> watch;
  if (recorder.options().step_mode) watch.emplace(recorder.seconds);
  long flags = 0;
  if (!recorder.in_step()) {
    const int64_t graph_task = graph_task_id();
    flags = call_owner(self, "on_submodule_call", self->module, graph_task).template cast<long>();
    if (recorder.is_off()) return;  // another thread has switched it off and on meanwhile
  }
  const bool wants_tensors = recorder.wants_tensors();
  try {
    Frame frame =
        recorder.begin_frame(self->module, std::move(class_name),
                             flags & kRecomputed ? FrameKind::kRecomputed : FrameKind::kForward);
    fill(frame);
    const bool wants_attention = recorder.finish(frame);
    if (wants_tensors && recorder.is_bad()) recorder.capture(tensors());
    if (wants_attention) call_owner(self, "on_frame", std::move(frame));
  } catch (...) {
    if (!recorder.options().step_mode) throw;
    recorder.note_failure(current_exception_text());
  }
  if (recorder.should_fetch()) call_owner(self, "process_now");
  if (flags & kEndsStep) call_owner(self, "on_submodule_call_end");
}

py::object class_name_of(PyObject* module) {
  PyTypeObject* type = unwrapped_type(Py_TYPE(module));
  if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0) return py::str(type->tp_name);
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyHeapTypeObject*>(type)->ht_name);
}

void record(FrameHook* self, PyObject* module, PyObject* args, PyObject* kwargs, PyObject* output) {
  Recorder& recorder = recorder_of(self);
  if (recorder.is_left_out()) {  // until the forward that began before the hooks has ended
    const py::handle called(module);
    if (!call_owner(self, "resumes", "on_submodule_call", called).template cast<bool>()) return;
  }
  if (recorder.is_off()) return;
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

// Counts a call inside a trace, but not in an export: any other trace may become the code of a
// training step.
void count_traced_call(FrameHook* self) {
  Recorder& recorder = recorder_of(self);
  const auto compiler = py::module_::import("torch.compiler");
  if (recorder.is_off() || compiler.attr("is_exporting")().cast<bool>()) return;
  TracedCall call{};
  call.items.emplace_back();
  call.items.back().why = py::str("inside a trace of operations (make_fx)");
  recorder.count_hidden(call);
}

void record_traced_frame(FrameHook* self, Recorder& recorder, const TracedCall& call,
                         at::TensorList tensors) {
  // Copies, since the compiled code will write to the tensors.
  const auto copies = [&]() -> py::object {
    py::list list;
    for (const at::Tensor& tensor : tensors) list.append(to_python(tensor.detach().clone()));
    return std::move(list);
  };
  const auto fill = [&](Frame& frame) { recorder.add_traced(frame, call, tensors); };
  if (call.kind == FrameKind::kForward) {
    return record_call(self, recorder, call.class_name, fill, copies);
  }
  if (call.kind == FrameKind::kBackward && !recorder.wants_gradients()) return;
  const Stopwatch watch(recorder.seconds);
  const bool wants_tensors = recorder.wants_tensors();
  Frame frame = recorder.begin_frame(self->module, call.class_name, call.kind);
  fill(frame);
  recorder.finish(frame);
  if (wants_tensors && recorder.is_bad()) recorder.capture(copies());
}

// run_hook(hook, module, args, kwargs, output): the forward hook that torch calls.
PyObject* run_hook(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  // Without kwargs: another thread puts the hook on, or takes it off, while this forward runs.
  if (nargs == 4 && is_frame_hook(args[0])) Py_RETURN_NONE;
  if (nargs != 5 || !is_frame_hook(args[0])) {
    PyErr_Format(PyExc_TypeError,
                 "run_hook takes a FrameHook, module, args, kwargs and output, got %zd arguments",
                 nargs);
    return nullptr;
  }
  try {
    auto* self = reinterpret_cast<FrameHook*>(args[0]);
    if (is_traced()) {
      count_traced_call(self);
    } else {
      record(self, args[1], args[2], args[3], args[4]);
    }
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// run_paused(function, *args): calls it with torch.compile's inspection of frames paused. Does
// nothing in a trace, which is no step.
PyObject* run_paused(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs == 0) {
    PyErr_SetString(PyExc_TypeError, "run_paused takes a function and its arguments, got nothing");
    return nullptr;
  }
  if (is_traced()) Py_RETURN_NONE;
  const EvalFramePause pause;
  const Hidden hidden;
  return PyObject_Vectorcall(args[0], args + 1, nargs - 1, nullptr);
}

PyMethodDef kFunctions[] = {
    {"run_hook", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_hook)),
     METH_FASTCALL, "Records the frame of a call; for torch to call as a forward hook."},
    {"run_paused", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_paused)),
     METH_FASTCALL, "Calls a function that torch.compile should not inspect."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void record_traced(const at::Tensor& handle_tensor, int64_t id, std::string_view text,
                   at::TensorList tensors) {
  const py::gil_scoped_acquire gil;
  FrameHook* self = find_hook(handle_tensor);
  if (self == nullptr) return;
  const auto alive = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(self));
  Recorder& recorder = recorder_of(self);
  if (recorder.is_off()) return;
  const TracedCall& call = recorder.traced_call(id, text);
  try {
    if (call.has_frame) {
      record_traced_frame(self, recorder, call, tensors);
    } else {
      recorder.count_hidden(call);
    }
  } catch (...) {
    call_root(self, "raised", call.is_root);
    throw;
  }
  if (call.is_root) call_root(self, "returned", call.has_loss);
}

void call_traced(const at::Tensor& handle_tensor, const std::string& method) {
  const py::gil_scoped_acquire gil;
  FrameHook* self = find_hook(handle_tensor);
  if (self == nullptr) return;
  const auto alive = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(self));
  Recorder& recorder = recorder_of(self);
  if (recorder.is_left_out() && method == "before") recorder.end_apart();  // a new forward
  if (recorder.is_off()) return;
  call_root(self, method.c_str());
}

void add_hook_functions(py::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), kFunctions) != 0) throw py::error_already_set();
}

}  // namespace overflow_fast
