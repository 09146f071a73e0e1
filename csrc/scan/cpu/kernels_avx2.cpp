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
#define OF_ISA avx2
#define OF_KERNELS kAvx2Kernels
#include "kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
