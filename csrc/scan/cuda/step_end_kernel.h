// The launcher of the kernel that ends a step: see SlotsEnd.
#pragma once

#include <cuda_runtime.h>

#include "../device.h"

namespace overflow_fast::cuda {

// Queues it on `stream`; `end.host` and `end.epoch` are addresses as the device sees them. Does
// not synchronise. Returns the launch's error, cleared.
cudaError_t launch_step_end(const SlotsEnd& end, cudaStream_t stream);

}  // namespace overflow_fast::cuda
