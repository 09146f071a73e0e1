// Runs the kernels of scan.metal with the arguments that torch's library objects hand on.
#pragma once

#include <metal_stdlib>

namespace metal_kernels {
// clang-format off: the second needs the first
#include "../../../overflow_fast/scanner/metal/keys.metal"
#include "../../../overflow_fast/scanner/metal/scan.metal"
// clang-format on
}  // namespace metal_kernels

#include <utility>
#include <vector>

namespace metal_emulation {

template <size_t... kIndices>
void call(void (*kernel_function)(metal::atomic_uint*, const long*,
                                  decltype((void)kIndices, (const uchar*)nullptr)..., uint, uint),
          void* slots, const long* words, const void* const* tensors,
          std::index_sequence<kIndices...>) {
  kernel_function(static_cast<metal::atomic_uint*>(slots), words,
                  static_cast<const uchar*>(tensors[kIndices])..., blockIdx.x, threadIdx.x);
}

// capacity: 4 or 24, the tensors that the kernel takes, all of which are given.
inline void launch(int64_t capacity, void* slots, const int64_t* words, const void* const* tensors,
                   int64_t num_blocks) {
  static_assert(sizeof(long) == sizeof(int64_t));
  const auto* list = reinterpret_cast<const long*>(words);
  emulation::body = [=] {
    if (capacity == 4) {
      call(metal_kernels::scan_4, slots, list, tensors, std::make_index_sequence<4>());
    } else {
      call(metal_kernels::scan_24, slots, list, tensors, std::make_index_sequence<24>());
    }
  };
  for (int64_t block = 0; block < num_blocks; ++block) {
    blockIdx.x = static_cast<unsigned>(block);
    emulation::run_block(metal_kernels::kThreads);
  }
}

}  // namespace metal_emulation
