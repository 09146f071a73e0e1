// What lanes of a warp exchange, and packed operations: where NVIDIA's and AMD's compilers differ.
//
// Warps count as 32 lanes. A wavefront of 64 is two of them, which exchange nothing with each
// other. AMD's part runs in the emulation alone (tests/cpp/cuda_emulation);
// tests/cpp/hip_check.py compiles it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace overflow_fast::cuda {

constexpr int kLanes = 32;

#if defined(__HIP_PLATFORM_AMD__)

template <class T>
__device__ T from_lane_xor(T value, int distance) {
  return __shfl_xor(value, distance);
}

// A kernel's only parameter, where the launch has put it: there is no __grid_constant__, and an
// array in a parameter is copied to each lane's scratch if it is indexed.
template <class T>
__device__ const T& parameter_of(const T& copy) {
#if defined(__HIP_DEVICE_COMPILE__)
  return *(const T*)__builtin_amdgcn_kernarg_segment_ptr();
#else
  return copy;
#endif
}

template <class F>
__device__ uint32_t in_halves(uint32_t a, uint32_t b, const F& f) {
  return (f(a & 0xffff, b & 0xffff) & 0xffff) | f(a >> 16, b >> 16) << 16;
}
__device__ inline uint32_t min_of_halves(uint32_t a, uint32_t b) {
  return in_halves(a, b, [](uint32_t x, uint32_t y) { return x < y ? x : y; });
}
__device__ inline uint32_t max_of_halves(uint32_t a, uint32_t b) {
  return in_halves(a, b, [](uint32_t x, uint32_t y) { return x < y ? y : x; });
}
__device__ inline uint32_t equal_halves(uint32_t a, uint32_t b) {
  return in_halves(a, b, [](uint32_t x, uint32_t y) { return x == y ? 0xffffu : 0u; });
}
__device__ inline uint32_t abs_of_halves(uint32_t a) {
  return in_halves(a, 0, [](uint32_t x, uint32_t) { return x >> 15 ? 0 - x : x; });
}

#else

constexpr unsigned kAllLanes = 0xffffffff;

template <class T>
__device__ T from_lane_xor(T value, int distance) {
  return __shfl_xor_sync(kAllLanes, value, distance);
}
template <class T>
__device__ const T& parameter_of(const T& parameter) {
  return parameter;
}
__device__ inline uint32_t min_of_halves(uint32_t a, uint32_t b) { return __vminu2(a, b); }
__device__ inline uint32_t max_of_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
__device__ inline uint32_t equal_halves(uint32_t a, uint32_t b) { return __vcmpeq2(a, b); }
__device__ inline uint32_t abs_of_halves(uint32_t a) { return __vabs2(a); }

#endif

}  // namespace overflow_fast::cuda
