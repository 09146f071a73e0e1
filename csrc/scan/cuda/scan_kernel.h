// The launcher of the scan kernel: views in, work lists out, as few launches as they fit in.
#pragma once

#include <cuda_runtime.h>

#include "work_list.h"

namespace overflow_fast::cuda {

// The blocks that a multiprocessor holds of the kernel for runs of vectors, and of that for any
// items, which needs more registers.
struct Fit {
  int runs = kBlocksPerMultiprocessor;
  int any = 2;
};

struct Target {
  cudaStream_t stream;
  int num_multiprocessors;
  int blocks_per_multiprocessor;  // 0: as many as fit
  bool takes_large_lists;         // kernel parameters of 32 KiB: a driver for CUDA 12.1 or newer
  bool takes_small_lists = true;  // of their own
  int turn = 0;                   // see WorkList
  bool splits_lists = true;       // of both kinds of items
  Fit small = {}, medium = {}, large = {};
};

// Fills in what fits, for the current device, and loads all kernels. Does not synchronise.
cudaError_t ask_fits(Target& target);
cudaError_t ask_fit_of_large(Fit& fit);

// Combines the stat of views[i] into slots[i], device memory, when `stream` gets there; does not
// synchronise. Stops at the first launch that fails and returns its error, cleared. `seen` is as
// the device sees it.
cudaError_t launch_scan(const View* views, int64_t count, Slot* slots, const Target& target,
                        SeenStep seen = {});

// In a file of its own, so that a driver that refuses its parameters still loads the others.
cudaError_t launch_large(LargeList& list, const Target& target);

}  // namespace overflow_fast::cuda
