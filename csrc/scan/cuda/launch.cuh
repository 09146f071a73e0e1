// One launch of the scan kernel.
#pragma once

#include <algorithm>

#include "scan_kernel.cuh"

namespace overflow_fast::cuda {

// Enough blocks for every chunk, and no more than run at once.
template <class List>
cudaError_t launch(const List& list, const Target& target) {
  if (list.num_chunks == 0) return cudaSuccess;
  const auto at_once =
      static_cast<uint32_t>(target.num_multiprocessors * target.blocks_per_multiprocessor);
  const auto kernel = needs_generic_path(list) ? scan_kernel<List, true> : scan_kernel<List, false>;
  void* arguments[] = {const_cast<List*>(&list)};
  const cudaError_t error = cudaLaunchKernel(kernel, dim3(std::min(list.num_chunks, at_once)),
                                             dim3(kThreads), arguments, 0, target.stream);
  if (error != cudaSuccess) (void)cudaGetLastError();  // not for the watched program's next check
  return error;
}

}  // namespace overflow_fast::cuda
