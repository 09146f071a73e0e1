// The CPU kernels by instruction set. Each set is the same source (kernels.inc) compiled for it.
#pragma once

#include <cstdint>

#include "../stat.h"

#define OF_STRINGIFY_(x) #x
#define OF_STRINGIFY(x) OF_STRINGIFY_(x)

namespace overflow_fast::cpu {

// Scans `rows` runs of `length` elements, `pitch` bytes apart, into `slot`.
using ScanRows = void (*)(const char* data, int64_t rows, int64_t pitch, int64_t length,
                          Slot& slot);
// Scans `length` single elements, `stride` bytes apart, into `slot`.
using ScanStrided = void (*)(const char* data, int64_t length, int64_t stride, Slot& slot);

struct Kernels {
  const char* isa;
  ScanRows rows[static_cast<int>(Dtype::kCount)];
  ScanStrided strided[static_cast<int>(Dtype::kCount)];
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// 0, 1, ... kCount - 1 as a pack (std::integer_sequence without its header).
template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};
using DtypeIndices = MakeIndices<static_cast<int>(Dtype::kCount)>::type;

// The best set this processor runs, chosen once. OVERFLOW_FAST_ISA=baseline|avx2|avx512 in the
// environment limits the choice to that set and lower ones.
const Kernels& kernels();

}  // namespace overflow_fast::cpu
