// FrameHook(owner, module_index): a module forward hook, called by torch with the module, its
// positional and keyword inputs and its output.
//
// The owner is a Python object with `_recorder` (a Recorder), on_frame(frame) for a frame that
// somebody should look at, on_waiting() for frames to be fetched at once, and on_unrooted(module_index, graph_task_id) -> int, asked for a frame
// while the root is not running: kRecomputed and kEndsStep, or-ed. The hook holds its owner, and
// nothing holds the hook but its module. It pickles and deep-copies as its two arguments.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

void add_frame_hook(pybind11::module_& m);

}  // namespace overflow_fast
