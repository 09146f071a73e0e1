// IEEE binary16 conversions in plain integers, for the magnitude of complex32.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace overflow_fast {

OF_HOST_DEVICE inline uint32_t half_to_float_bits(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  uint32_t exponent = (half >> 10) & 0x1f;
  uint32_t fraction = half & 0x3ff;
  if (exponent == 0x1f) return sign | 0x7f800000 | (fraction << 13);
  if (exponent == 0) {
    if (fraction == 0) return sign;
    exponent = 1;
    while ((fraction & 0x400) == 0) {
      fraction <<= 1;
      --exponent;
    }
    fraction &= 0x3ff;
  }
  return sign | ((exponent + 112) << 23) | (fraction << 13);
}

// Rounds to nearest, ties to even. `bits` is a non-negative float.
OF_HOST_DEVICE inline uint16_t float_to_half_bits(uint32_t bits) {
  if (bits > 0x7f800000) return 0x7e00;
  if (bits >= 0x477ff000) return 0x7c00;  // 65520 and above round to inf
  if (bits < 0x33000001) return 0;        // 2^-25 and below round to zero
  const int exponent = static_cast<int>(bits >> 23) - 112;
  const uint32_t significand = (bits & 0x7fffff) | 0x800000;
  const int shift = exponent > 0 ? 13 : 14 - exponent;
  // A normal result keeps its implicit bit, which then adds one to the exponent field.
  const uint32_t base = exponent > 0 ? static_cast<uint32_t>(exponent - 1) << 10 : 0;
  const uint32_t kept = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1);
  const uint32_t half = 1u << (shift - 1);
  return static_cast<uint16_t>(base + kept + (rest > half || (rest == half && (kept & 1))));
}

}  // namespace overflow_fast
