// Memory that a kernel reads: a GPU's where nvcc compiles, the heap in the emulation. A block ends
// with its last byte, so that memcheck and AddressSanitizer see a read past it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace overflow_fast::device {

// Ends the program with the error's name; status 2 distinguishes it from a mismatch.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
#if defined(__CUDACC__)
  std::printf("FAIL: %s: %s\n", what, cudaGetErrorString(error));
#else
  std::printf("FAIL: %s: error %d\n", what, static_cast<int>(error));
#endif
  std::exit(2);
}

#if defined(__CUDACC__)

constexpr bool kIsEmulated = false;

inline char* allocate(int64_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes > 0 ? bytes : 1), "cudaMalloc");
  return static_cast<char*>(memory);
}
inline void release(void* memory) { check(cudaFree(memory), "cudaFree"); }
inline void write(void* to, const void* from, int64_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the GPU");
}
inline void set(void* to, int value, int64_t bytes) {
  check(cudaMemset(to, value, bytes), "cudaMemset");
}
// Waits for the kernels.
inline void read(void* to, const void* from, int64_t bytes) {
  check(cudaDeviceSynchronize(), "a kernel");
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy from the GPU");
}
inline int64_t free_bytes() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<int64_t>(free);
}
inline int num_multiprocessors() {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "the first device");
  return count;
}
inline bool takes_large_lists() {
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  return driver >= 12010;
}
inline void describe(char* text, size_t room) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::snprintf(text, room, "%s, sm_%d%d", properties.name, properties.major, properties.minor);
}

#else

constexpr bool kIsEmulated = true;

inline char* allocate(int64_t bytes) { return static_cast<char*>(std::malloc(bytes)); }
inline void release(void* memory) { std::free(memory); }
inline void write(void* to, const void* from, int64_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}
inline void set(void* to, int value, int64_t bytes) { std::memset(to, value, bytes); }
inline void read(void* to, const void* from, int64_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}
inline int64_t free_bytes() { return 0; }
inline int num_multiprocessors() { return 4; }
inline bool takes_large_lists() { return true; }
inline void describe(char* text, size_t room) { std::snprintf(text, room, "emulated"); }

#endif

}  // namespace overflow_fast::device
