// The scan kernel with other constants, to measure.
#include "../csrc/scan/cuda/scan_kernel.cu"
#include "../csrc/scan/cuda/scan_kernel_large.cu"

using overflow_fast::Slot;

// Scans `count` contiguous tensors of `numel` elements each, one behind the other.
extern "C" int scan_variant(const char* data, int64_t numel, int dtype, int64_t count, Slot* slots,
                            int multiprocessors, int large, cudaStream_t stream) {
  using namespace overflow_fast;
  const int64_t stride = 1, bytes = numel * kDtypes[dtype].itemsize;
  View views[1024];
  for (int64_t i = 0; i < count; ++i) {
    views[i] = {data + i * bytes, static_cast<Dtype>(dtype), &numel, &stride, 1};
  }
  cuda::Target target{stream, multiprocessors, cuda::kBlocksPerMultiprocessor, large != 0};
  return cuda::launch_scan(views, count, slots, target);
}
