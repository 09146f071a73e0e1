// What PTX's instructions compute ("Parallel Thread Execution ISA"), those that the kernels have.
//
// A register is bits without a type; each instruction says what they are. A type's name here makes
// a value of PTX's type of a register's bits: s32(r1) the signed number, f64(r1) the double. A
// result is converted back as it is assigned, floating-point ones by bits().
//
// What is known to differ from a GPU: rsqrt.approx has errors of its own there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ptx {

using b8 = uint8_t;
using u8 = uint8_t;
using s8 = int8_t;
using b16 = uint16_t;
using u16 = uint16_t;
using s16 = int16_t;
using b32 = uint32_t;
using u32 = uint32_t;
using s32 = int32_t;
using b64 = uint64_t;
using u64 = uint64_t;
using s64 = int64_t;
using u16x2 = uint32_t;
using pred = bool;

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float f32(uint64_t bits) { return bits_as<float>(static_cast<uint32_t>(bits)); }
inline double f64(uint64_t bits) { return bits_as<double>(bits); }
inline uint32_t bits(float value) { return bits_as<uint32_t>(value); }
inline uint64_t bits(double value) { return bits_as<uint64_t>(value); }

template <class T>
T least(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);  // of a nan and a number, it
  return b < a ? b : a;
}
template <class T>
T most(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
  return a < b ? b : a;
}
// Of both halves: min.u16x2, max.u16x2.
inline uint32_t least_halves(uint32_t a, uint32_t b) {
  return least(a & 0xffff, b & 0xffff) | least(a >> 16, b >> 16) << 16;
}
inline uint32_t most_halves(uint32_t a, uint32_t b) {
  return most(a & 0xffff, b & 0xffff) | most(a >> 16, b >> 16) << 16;
}

template <class T>
T absolute(T a) {
  return std::is_floating_point_v<T> ? std::fabs(a) : a < 0 ? T(-a) : a;  // of the least: itself
}

// Shifts end at a register's width, those of C++ are undefined from there on.
template <class T>
T shifted_left(T a, uint32_t by) {
  return by < 8 * sizeof(T) ? T(a << by) : T(0);
}
template <class T>
T shifted_right(T a, uint32_t by) {
  return T(a >> std::min<uint32_t>(by, 8 * sizeof(T) - 1) >> (by >= 8 * sizeof(T)));
}
inline uint32_t leading_zeros(uint32_t a) { return a == 0 ? 32 : __builtin_clz(a); }
inline uint32_t leading_zeros(uint64_t a) { return a == 0 ? 64 : __builtin_clzll(a); }

// The low `count` bits of `a`, from bit `at` on in `b`.
template <class T>
T inserted(T a, T b, uint32_t at, uint32_t count) {
  at &= 255;
  count &= 255;
  const T ones = shifted_left(
      shifted_right(T(-1), 8 * sizeof(T) - std::min<uint32_t>(count, 8 * sizeof(T))), at);
  return T((b & ~ones) | (shifted_left(a, at) & ones));
}

// Bytes of b:a, four bits of `which` for each; their upper bit repeats the byte's sign.
inline uint32_t chosen_bytes(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t bytes = a | uint64_t{b} << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t one = which >> (4 * i);
    uint32_t byte = bytes >> (8 * (one & 7)) & 255;
    if (one & 8) byte = byte >> 7 ? 255 : 0;
    out |= byte << (8 * i);
  }
  return out;
}

// The upper half of a product; a product of twice the width.
inline uint32_t upper_product(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
inline int32_t upper_product(int32_t a, int32_t b) { return int64_t{a} * b >> 32; }
inline uint64_t upper_product(uint64_t a, uint64_t b) {
  return static_cast<unsigned __int128>(a) * b >> 64;
}
inline uint32_t wide_product(uint16_t a, uint16_t b) { return uint32_t{a} * b; }
inline uint64_t wide_product(uint32_t a, uint32_t b) { return uint64_t{a} * b; }
inline int64_t wide_product(int32_t a, int32_t b) { return int64_t{a} * b; }

// As rough as the lower 32 bits of a double left out: the instruction promises no more.
inline double rough_rsqrt(double a) {
  return bits_as<double>(bits(1 / std::sqrt(a)) & 0xffffffff00000000);
}

}  // namespace ptx
