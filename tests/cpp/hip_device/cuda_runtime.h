// A stand-in for the parts of HIP that the kernels use, with which clang compiles them for AMD's
// GPUs where ROCm is not installed (tests/cpp/hip_check.py). It is compiled and read, never run.
#pragma once

#define __HIP_PLATFORM_AMD__ 1

#include <cstddef>
#include <cstdint>

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  __host__ __device__ dim3(unsigned size = 1) : x(size) {}
  unsigned x;
};

// Each is read where it is used.
#define threadIdx (Index{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (Index{__builtin_amdgcn_workgroup_id_x()})
#define blockDim (Index{__builtin_amdgcn_workgroup_size_x()})
#define gridDim (Index{__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()})
struct Index {
  unsigned x;
};

__device__ inline void __syncthreads() { __builtin_amdgcn_s_barrier(); }
__device__ int __syncthreads_or(int predicate);
__device__ inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
__device__ inline int __shfl_xor(int value, int distance) {
  const int lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
  return __builtin_amdgcn_ds_bpermute(4 * (lane ^ distance), value);
}
template <class T>
__device__ T __shfl_xor(T value, int distance) {
  const auto low = static_cast<uint32_t>(__shfl_xor(static_cast<int>(value), distance));
  const auto high = static_cast<uint32_t>(__shfl_xor(static_cast<int>(value >> 32), distance));
  return low | static_cast<T>(high) << 32;
}

using Word = unsigned long long;
__device__ inline Word atomicMin(Word* at, Word value) {
  return __atomic_fetch_min(at, value, __ATOMIC_RELAXED);
}
__device__ inline Word atomicMax(Word* at, Word value) {
  return __atomic_fetch_max(at, value, __ATOMIC_RELAXED);
}
__device__ inline Word atomicAdd(Word* at, Word value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
__device__ inline Word atomicOr(Word* at, Word value) {
  return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}

__device__ inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
__device__ inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}
__device__ inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
__device__ inline uint32_t max(uint32_t a, uint32_t b) { return a < b ? b : a; }
__device__ inline double __longlong_as_double(long long bits) {
  return __builtin_bit_cast(double, bits);
}
__device__ inline long long __double_as_longlong(double x) {
  return __builtin_bit_cast(long long, x);
}
__device__ inline float __uint_as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
__device__ inline uint32_t __float_as_uint(float x) { return __builtin_bit_cast(uint32_t, x); }
__device__ double hypot(double x, double y);
__device__ inline double sqrt(double x) { return __builtin_sqrt(x); }
__device__ inline float sqrt(float x) { return __builtin_sqrtf(x); }

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
cudaError_t cudaGetLastError();
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel kernel, int threads,
                                                          size_t bytes);
template <class Kernel>
cudaError_t cudaLaunchKernel(Kernel kernel, dim3 grid, dim3 block, void** arguments, size_t bytes,
                             cudaStream_t stream);
