// While an Unprofiled lives, no profiler is told of the operations of this thread.
#pragma once

#include <ATen/record_function.h>

namespace overflow_fast {

using Unprofiled = at::DisableRecordFunctionGuard;

}  // namespace overflow_fast
