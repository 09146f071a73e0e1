// The kernels for x86-64 with AVX2.
#include "../half.h"
#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi2,fma")
#endif

#define OF_DOUBLES 4
// As wide as a register: of wider vectors gcc keeps some in memory, which takes 95 ns for a tensor
// of 64 bytes, and 3 times as long for one of 16 KiB.
#define OF_VECTOR_BYTES 32
#define OF_ISA avx2
#define OF_KERNELS kAvx2Kernels
#include "kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
