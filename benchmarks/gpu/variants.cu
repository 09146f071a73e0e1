// The scan kernel with other constants, and two ways for slots to come to the host, to measure.
#include "../../csrc/cuda/scan_kernel.cu"
#include "../../csrc/cuda/scan_kernel_large.cu"

namespace {

using overflow_fast::Slot;

// Writes the slots into mapped host memory and resets them, then a number that says they are there.
__global__ void publish_kernel(Slot* slots, int64_t count, Slot* mapped, uint64_t* epoch) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    mapped[i] = slots[i];
    slots[i] = Slot{};
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) *static_cast<volatile uint64_t*>(epoch) = *epoch + 1;
}

}  // namespace

// Scans `count` contiguous tensors of `numel` elements each, one behind the other.
extern "C" int scan_variant(const char* data, int64_t numel, int dtype, int64_t count, Slot* slots,
                            int multiprocessors, int large, cudaStream_t stream) {
  using namespace overflow_fast;
  const int64_t stride = 1, bytes = numel * kDtypes[dtype].itemsize;
  View views[1024];
  for (int64_t i = 0; i < count; ++i) {
    views[i] = {data + i * bytes, static_cast<Dtype>(dtype), &numel, &stride, 1};
  }
  return cuda::launch_scan(views, count, slots,
                           {stream, multiprocessors, cuda::kBlocksPerMultiprocessor, large != 0});
}

extern "C" int publish_variant(Slot* slots, int64_t count, Slot* mapped, uint64_t* epoch,
                               cudaStream_t stream) {
  publish_kernel<<<1, 1024, 0, stream>>>(slots, count, mapped, epoch);
  return static_cast<int>(cudaGetLastError());
}
