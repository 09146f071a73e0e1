// The floor of every scan on a GPU: reads each 16-byte vector once, keeps their xor, and leaves
// the result to one atomic per block. The same threads, blocks and loads in flight as the scan.
#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

__global__ void __launch_bounds__(kThreads)
    plain_read_kernel(const uint4* data, int64_t count, unsigned* out) {
  const int64_t begin = count * blockIdx.x / gridDim.x;
  const int64_t end = count * (blockIdx.x + 1) / gridDim.x;
  unsigned all = 0;
  int64_t i = begin + threadIdx.x;
  for (; i + (kUnroll - 1) * kThreads < end; i += kUnroll * kThreads) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = __ldg(data + i + u * kThreads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) all ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < end; i += kThreads) {
    const uint4 v = __ldg(data + i);
    all ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  all = __reduce_xor_sync(0xffffffff, all);
  if (threadIdx.x % 32 == 0 && all != 0) atomicXor(out, all);
}

}  // namespace

// Whole vectors only. Returns a cudaError_t.
extern "C" int plain_read(const void* data, int64_t bytes, void* out, int blocks, void* stream) {
  const int64_t count = bytes / 16;
  const int64_t needed = (count + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  const int grid = static_cast<int>(needed < blocks ? needed : blocks);
  if (grid == 0) return 0;
  plain_read_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(data), count, static_cast<unsigned*>(out));
  return static_cast<int>(cudaGetLastError());
}
