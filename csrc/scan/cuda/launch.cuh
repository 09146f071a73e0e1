// One launch of the scan kernel, or two for a list of both kinds of items.
#pragma once

#include <algorithm>

#include "scan_kernel.cuh"

namespace overflow_fast::cuda {

// Asks how many blocks of a list's kernels a multiprocessor holds, which loads them: the first
// launch within a capture could not.
template <class List>
cudaError_t ask_fit(Fit& fit) {
  cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &fit.runs, scan_kernel<List, false>, kThreads, 0);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit.any, scan_kernel<List, true>,
                                                          kThreads, 0);
  }
  if (error != cudaSuccess) (void)cudaGetLastError();  // not for the watched program's next check
  return error;
}

// The number of blocks that run at once.
inline uint32_t blocks_at_once(const Target& target, const Fit& fit, bool is_generic) {
  const int fitting = is_generic ? fit.any : fit.runs;
  const int each =
      target.blocks_per_multiprocessor > 0 ? target.blocks_per_multiprocessor : fitting;
  return static_cast<uint32_t>(target.num_multiprocessors * std::max(1, each));
}

// Enough blocks for every chunk, and no more than run at once.
template <class List, bool kIsGeneric>
cudaError_t launch_path(const List& list, const Target& target, const Fit& fit) {
  const uint32_t blocks = std::min(list.num_chunks, blocks_at_once(target, fit, kIsGeneric));
  void* arguments[] = {const_cast<List*>(&list)};
  const cudaError_t error = cudaLaunchKernel(scan_kernel<List, kIsGeneric>, dim3(blocks),
                                             dim3(kThreads), arguments, 0, target.stream);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

// Rows and single elements need a kernel of which fewer blocks fit. Runs get a launch of their own
// where they keep the whole device busy, which a launch of a few microseconds is little beside.
template <class List>
cudaError_t launch(List& list, const Target& target, const Fit& fit) {
  if (list.num_chunks == 0) return cudaSuccess;
  list.turn = static_cast<uint32_t>(target.turn);
  const auto is_run = [](const WorkItem& item) { return !needs_generic_path(item); };
  uint32_t of_runs = 0;
  for (uint32_t i = 0; i < list.num_items; ++i) {
    if (is_run(list.items[i])) of_runs += chunks_of(list.items[i]);
  }
  if (of_runs == list.num_chunks) return launch_path<List, false>(list, target, fit);
  if (!target.splits_lists || of_runs < blocks_at_once(target, fit, false)) {
    return launch_path<List, true>(list, target, fit);
  }
  number_chunks(list, is_run);
  const cudaError_t error = launch_path<List, false>(list, target, fit);
  if (error != cudaSuccess) return error;
  number_chunks(list, [&](const WorkItem& item) { return !is_run(item); });
  return launch_path<List, true>(list, target, fit);
}

}  // namespace overflow_fast::cuda
