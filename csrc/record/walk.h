// From a module call to entries: its parameters, its inputs, its outputs in any nesting.
#pragma once

#include "recorder.h"

namespace overflow_fast {

void record_parameters(Recorder& recorder, Frame& frame, PyObject* module);
void record_inputs(Recorder& recorder, Frame& frame, PyObject* args, PyObject* kwargs);
void record_outputs(Recorder& recorder, Frame& frame, PyObject* output);

}  // namespace overflow_fast
