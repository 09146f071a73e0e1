// The kernels for x86-64 with AVX-512 F, BW, DQ and VL.
#include "../half.h"
#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,fma"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,fma,prefer-vector-width=512")
#endif

#define OF_DOUBLES 8
#define OF_VECTOR_BYTES 64
#define OF_ISA avx512
#define OF_KERNELS kAvx512Kernels
#include "kernels.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
