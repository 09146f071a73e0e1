#include <algorithm>

#include "step_end_kernel.h"

namespace overflow_fast::cuda {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;  // of a block, on each GPU

// Runs as one block: only then a thread knows when everything is written, and a step rarely has
// more slots than a block has threads. The scans that wrote the slots are earlier work of the
// stream, or the stream has waited for them.
//
// Thread 0 fences the whole block's writes, which the barrier has ordered before it, and writes
// the number last: a host that reads it (acquire) sees every slot, those of earlier launches of
// the stream too.
__global__ void __launch_bounds__(kMaxThreads)
    step_end_kernel(const __grid_constant__ SlotsEnd end) {
  bool is_up[kNumFlags] = {};
  for (int64_t i = threadIdx.x; i < end.count; i += blockDim.x) {
    const Slot slot = end.slots[i];
    if (end.host != nullptr) end.host[i] = slot;
    for (int flag = 0; end.flag_bits != nullptr && flag < kNumFlags; ++flag) {
      const auto kinds = static_cast<uint64_t>(end.flag_bits[flag * end.flag_stride + i]);
      is_up[flag] |= (slot.nonfinite_kinds() & kinds) != 0;
    }
    end.slots[i] = Slot{};
  }
  for (int flag = 0; end.flag_bits != nullptr && flag < kNumFlags; ++flag) {
    const bool any = __syncthreads_or(is_up[flag]);
    if (threadIdx.x == 0 && (any || end.sets_flags)) end.flags[flag] = any ? 1.0f : 0.0f;
  }
  if (end.epoch == nullptr) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    *static_cast<volatile uint64_t*>(end.epoch) = end.number;
  }
}

cudaError_t launch_step_end(const SlotsEnd& end, cudaStream_t stream) {
  const auto warps = static_cast<int>((end.count + kWarp - 1) / kWarp);
  void* arguments[] = {const_cast<SlotsEnd*>(&end)};
  const cudaError_t error =
      cudaLaunchKernel(step_end_kernel, dim3(1),
                       dim3(std::clamp(warps * kWarp, kWarp, kMaxThreads)), arguments, 0, stream);
  if (error != cudaSuccess) (void)cudaGetLastError();  // not for the watched program's next check
  return error;
}

}  // namespace overflow_fast::cuda
