// A stand-in for the parts of CUDA that the kernels use, so that their source runs on a CPU: every
// thread of a block is a fiber, barriers are where fibers hand over, blocks run one after another.
// A barrier that not all threads reach ends the program. Races between blocks are not seen. With
// __HIP_PLATFORM_AMD__ defined, warps have 64 lanes and AMD's names, as ROCm's have.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>

#include "../fibers.h"

#define __global__
#define __device__
#define __host__
#define __noinline__ __attribute__((noinline))
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  dim3(unsigned size = 1) : x(size) {}
  unsigned x;
};
inline dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulation {

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber : fiber::Fiber {
  State state;
  unsigned num_exchanges;
};

#if defined(__HIP_PLATFORM_AMD__)
constexpr int kWarp = 64;
#else
constexpr int kWarp = 32;
#endif

inline std::deque<Fiber> fibers;  // which moves none when there are more
inline int current;
inline std::function<void()> body;
inline int vote, voted;
inline uint64_t exchanged[2][1024 / kWarp][kWarp];  // by parity, warp and lane

inline void hand_over(State state) {
  fibers[current].state = state;
  fiber::hand_over();
}

inline void run_body() {
  body();
  fibers[current].state = State::kDone;
}

inline int count(int first, int last, State state) {
  return static_cast<int>(std::count_if(fibers.begin() + first, fibers.begin() + last,
                                        [&](const Fiber& f) { return f.state == state; }));
}

inline bool release(int first, int last, State barrier) {
  const int arrived = count(first, last, barrier);
  if (arrived == 0) return false;
  if (arrived != last - first) {
    if (barrier == State::kAtBlockBarrier && count(first, last, State::kReady) > 0) return false;
    std::fprintf(stderr, "emulation: %d of %d threads reached a barrier\n", arrived, last - first);
    std::abort();
  }
  for (int i = first; i < last; ++i) fibers[i].state = State::kReady;
  return true;
}

// Runs every thread up to its next barrier, until all are done.
inline void run_block(int num_threads) {
  if (fibers.size() < static_cast<size_t>(num_threads)) fibers.resize(num_threads);
  for (int i = 0; i < num_threads; ++i) {
    fibers[i].state = State::kReady;
    fibers[i].num_exchanges = 0;
  }
  fiber::body = run_body;
  vote = 0;
  while (count(0, num_threads, State::kDone) < num_threads) {
    for (current = 0; current < num_threads; ++current) {
      if (fibers[current].state != State::kReady) continue;
      threadIdx.x = current;
      fiber::resume(fibers[current]);
    }
    bool is_released = false;
    for (int warp = 0; warp < num_threads; warp += kWarp) {
      const int end = std::min(warp + kWarp, num_threads);  // AMD's last one may be half
      is_released |= release(warp, end, State::kAtWarpBarrier);
    }
    if (!is_released && release(0, num_threads, State::kAtBlockBarrier)) {
      voted = vote;
      vote = 0;
    }
  }
}

// Every lane's value, seen by the whole warp.
inline const uint64_t* exchange(uint64_t value) {
  const unsigned parity = fibers[current].num_exchanges++ % 2;
  uint64_t* warp = exchanged[parity][threadIdx.x / kWarp];
  warp[threadIdx.x % kWarp] = value;
  hand_over(State::kAtWarpBarrier);
  return warp;
}

}  // namespace emulation

inline void __syncthreads() { emulation::hand_over(emulation::State::kAtBlockBarrier); }
inline int __syncthreads_or(int predicate) {
  emulation::vote |= predicate != 0;
  __syncthreads();
  return emulation::voted;
}
inline void __threadfence_system() {}
#if defined(__HIP_PLATFORM_AMD__)
inline uint64_t __shfl_xor(uint64_t value, int distance) {
  return emulation::exchange(value)[(threadIdx.x % emulation::kWarp) ^ distance];
}
#else
inline uint64_t __shfl_xor_sync(unsigned, uint64_t value, int distance) {
  return emulation::exchange(value)[(threadIdx.x % 32) ^ distance];
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
  const uint64_t* warp = emulation::exchange(value);
  return static_cast<uint32_t>(*std::min_element(warp, warp + 32));
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  const uint64_t* warp = emulation::exchange(value);
  return static_cast<uint32_t>(*std::max_element(warp, warp + 32));
}
#endif

using Word = unsigned long long;
inline void atomicMin(Word* at, Word value) { *at = std::min(*at, value); }
inline void atomicMax(Word* at, Word value) { *at = std::max(*at, value); }
inline Word atomicAdd(Word* at, Word value) { return std::exchange(*at, *at + value); }
inline Word atomicOr(Word* at, Word value) { return std::exchange(*at, *at | value); }

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a < b ? b : a; }

namespace emulation {

inline int num_launches;

// A function of 16-bit halves, applied to both.
template <class F>
uint32_t by_halves(uint32_t a, uint32_t b, F f) {
  const auto low = static_cast<uint16_t>(f(a & 0xffff, b & 0xffff));
  const auto high = static_cast<uint16_t>(f(a >> 16, b >> 16));
  return low | static_cast<uint32_t>(high) << 16;
}

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace emulation

inline uint32_t __vminu2(uint32_t a, uint32_t b) {
  return emulation::by_halves(a, b, [](uint32_t x, uint32_t y) { return min(x, y); });
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return emulation::by_halves(a, b, [](uint32_t x, uint32_t y) { return max(x, y); });
}
inline uint32_t __vcmpeq2(uint32_t a, uint32_t b) {
  return emulation::by_halves(a, b, [](uint32_t x, uint32_t y) { return x == y ? 0xffff : 0; });
}
inline uint32_t __vabs2(uint32_t a) {
  return emulation::by_halves(a, 0, [](uint32_t x, uint32_t) { return x >> 15 ? 0 - x : x; });
}

inline double __longlong_as_double(long long bits) { return emulation::bits_as<double>(bits); }
inline long long __double_as_longlong(double x) { return emulation::bits_as<long long>(x); }
inline float __uint_as_float(uint32_t bits) { return emulation::bits_as<float>(bits); }
inline uint32_t __float_as_uint(float x) { return emulation::bits_as<uint32_t>(x); }
using std::hypot;
using std::sqrt;

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

template <class Parameter>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameter), dim3 grid, dim3 block, void** arguments,
                             size_t, cudaStream_t) {
  const auto& parameter = *static_cast<const Parameter*>(arguments[0]);
  if (grid.x == 0 || block.x == 0) return cudaErrorInvalidValue;
  ++emulation::num_launches;
  gridDim = grid;
  blockDim = block;
  emulation::body = [&] { kernel(parameter); };
  for (unsigned i = 0; i < grid.x; ++i) {
    blockIdx.x = i;
    emulation::run_block(static_cast<int>(block.x));
  }
  return cudaSuccess;
}
