// The launcher of the scan kernel: views in, work lists out, as few launches as they fit in.
#pragma once

#include <cuda_runtime.h>

#include "work_list.h"

namespace overflow_fast::cuda {

struct Target {
  cudaStream_t stream;
  int num_multiprocessors;
  int blocks_per_multiprocessor;
  bool takes_large_lists;         // kernel parameters of 32 KiB: a driver for CUDA 12.1 or newer
  bool takes_small_lists = true;  // of their own
};

// Combines the stat of views[i] into slots[i], device memory, when `stream` gets there; does not
// synchronise. Stops at the first launch that fails and returns its error, cleared.
cudaError_t launch_scan(const View* views, int64_t count, Slot* slots, const Target& target);

// In a file of its own, so that a driver that refuses its parameters still loads the others.
cudaError_t launch_large(const LargeList& list, const Target& target);

}  // namespace overflow_fast::cuda
