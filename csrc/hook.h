// FrameHook(owner, module_index): who records the frames of a module. functools.partial(run_hook,
// hook) is the forward hook that torch calls, with the module, its positional and keyword inputs
// and its output.
//
// The owner is a Python object with `_recorder` (a Recorder), on_frame(frame) for a frame that
// somebody should look at, on_waiting() for frames to be fetched at once, and
// on_unrooted(module_index, graph_task_id) -> int, asked for a frame while the root is not running:
// kRecomputed and kEndsStep, or-ed. The hook holds its owner, and nothing holds the hook but its
// module. It pickles and deep-copies as its two arguments.
//
// Compiled code knows a hook by its ticket, a tensor, because tensors are what modules that share
// compiled code may differ in. The owner's `plan` says what to list, its `device` where compiled
// code runs, and on_traced_root(has_loss) is told when the root has
// returned, and on_traced_raised(is_root) when a frame has raised, the root's or another.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <string>

namespace overflow_fast {

void add_frame_hook(pybind11::module_& m);

// What the operators do: see traced.h. A ticket of a hook that is gone is nobody's.
void record_traced(const at::Tensor& ticket, const std::string& call, at::TensorList tensors);
// Calls the owner's method.
void call_traced(const at::Tensor& ticket, const std::string& method);

}  // namespace overflow_fast
