// FrameHook(owner, module_index) records the frames of a module. functools.partial(run_hook,
// hook) is the forward hook that torch calls, with the module, its positional and keyword inputs
// and its output.
//
// The owner is a Python object with `recorder` (a Recorder) and three methods: on_frame(frame) is
// called for a frame that needs attention, process_now() to classify waiting frames at once, and
// on_submodule_call(module_index, graph_task_id) -> int for a frame while the root is not running;
// it returns kRecomputed and kEndsStep, or-ed. The hook holds its owner, and only its module holds
// the hook. It pickles and deep-copies as its two arguments.
//
// Compiled code identifies a hook by its `handle_tensor`, because modules that share compiled code
// may differ in their tensors, and an owner by that of its `root_hook`. The owner's `plan` holds
// what to list, its `device` is where compiled code runs, and its `compiled_boundary` replaces the
// root's hooks in compiled code: see overflow_fast/detector/compiled.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

#include "../record/recorder.h"

namespace overflow_fast {

struct FrameHook {
  PyObject_HEAD
  PyObject* owner;
  PyObject* recorder_object;  // keeps `recorder` alive
  Recorder* recorder;
  PyObject* handle_tensor;  // null until the hook is traced
  uint32_t module;
};

void add_frame_hook(py::module_& m);
bool is_frame_hook(PyObject* object);
// Reads the owner at the first call: a copied or unpickled hook is created before its owner is
// complete.
Recorder& recorder_of(FrameHook* self);
// The hook with this handle, or null if it is gone.
FrameHook* find_hook(const at::Tensor& handle_tensor);

// The functions that torch calls, and those that the operators call: see traced.h.
void add_hook_functions(py::module_& m);
void record_traced(const at::Tensor& handle_tensor, int64_t id, std::string_view text,
                   at::TensorList tensors);
// Calls a method of the owner's `compiled_boundary`.
void call_traced(const at::Tensor& handle_tensor, const std::string& method);

}  // namespace overflow_fast
