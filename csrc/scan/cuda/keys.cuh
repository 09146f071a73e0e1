// How bits become keys on the device: packed for 16-byte vectors, one by one for elements.
#pragma once

#include "../half.h"
#include "../stat.h"
#include "lanes.cuh"

namespace overflow_fast::cuda {

// The extremes of some keys. With no key at all, low > high.
struct Extremes {
  uint64_t low = kNoKey;
  uint64_t high = 0;

  __device__ void take(uint64_t key) {
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
};

// VectorKeys<bytes, kind>: the extremes of 16-byte vectors of real elements. Starting values are
// neutral: only a thread that took no vector returns them, and other threads of its item took some.
template <int kBytes, KeyKind kKind>
struct VectorKeys;

template <KeyKind kKind>
struct VectorKeys<8, kKind> {
  Extremes keys;

  __device__ static uint64_t key(uint32_t low_word, uint32_t high_word) {
    const uint64_t bits = low_word | static_cast<uint64_t>(high_word) << 32;
    if constexpr (kKind == KeyKind::kSignMagnitude) return bits & 0x7fffffffffffffff;
    if constexpr (kKind == KeyKind::kTwosComplement) return bits >> 63 ? 0 - bits : bits;
    return bits;
  }
  __device__ void take(uint32_t low_word, uint32_t high_word) {
    keys.take(key(low_word, high_word));
  }
  __device__ Extremes extremes() const { return keys; }
};

template <KeyKind kKind>
struct VectorKeys<4, kKind> {
  uint32_t low = 0xffffffff;
  uint32_t high = 0;

  __device__ void take(uint32_t word) {
    if constexpr (kKind == KeyKind::kSignMagnitude) word &= 0x7fffffff;
    if constexpr (kKind == KeyKind::kTwosComplement) word = word >> 31 ? 0 - word : word;
    low = min(low, word);
    high = max(high, word);
  }
  __device__ Extremes extremes() const { return {low, high}; }
};

// Two 16-bit keys to a register: from sm_90 on a packed minimum and maximum are one instruction
// each, before that the compiler emulates them.
template <KeyKind kKind>
struct VectorKeys<2, kKind> {
  uint32_t low = 0xffffffff;
  uint32_t high = 0;

  __device__ void take_keys(uint32_t pair) {
    low = min_of_halves(low, pair);
    high = max_of_halves(high, pair);
  }
  __device__ void take(uint32_t word) {
    if constexpr (kKind == KeyKind::kSignMagnitude) word &= 0x7fff7fff;
    if constexpr (kKind == KeyKind::kTwosComplement)
      word = abs_of_halves(word);  // |-32768|: its bits
    take_keys(word);
  }
  __device__ Extremes extremes() const {
    return {min(low & 0xffff, low >> 16), max(high & 0xffff, high >> 16)};
  }
};

// Bytes go as the upper halves of 16-bit keys: packed 8-bit extremes are emulated everywhere.
template <KeyKind kKind>
struct VectorKeys<1, kKind> {
  VectorKeys<2, KeyKind::kUnsigned> pairs;

  __device__ static uint32_t keys(uint32_t bytes) {
    if constexpr (kKind == KeyKind::kSignMagnitude) return bytes & 0x7f007f00;
    bytes &= 0xff00ff00;
    if constexpr (kKind == KeyKind::kTwosComplement) return abs_of_halves(bytes);
    if constexpr (kKind == KeyKind::kNegativeZeroNan) {
      return bytes & (0x7fff7fff | equal_halves(bytes, 0x80008000));
    }
    return bytes;
  }
  __device__ void take(uint32_t word) {
    pairs.take_keys(keys(word));
    pairs.take_keys(keys(word << 8));
  }
  __device__ Extremes extremes() const {
    const Extremes pair = pairs.extremes();
    return {pair.low >> 8, pair.high >> 8};
  }
};

template <int kBytes, KeyKind kKind>
__device__ void take_vector(VectorKeys<kBytes, kKind>& keys, const uint4& v) {
  if constexpr (kBytes == 8) {
    keys.take(v.x, v.y);
    keys.take(v.z, v.w);
  } else {
    keys.take(v.x);
    keys.take(v.y);
    keys.take(v.z);
    keys.take(v.w);
  }
}

// The properties of a dtype that the kernel needs at run time.
struct Format {
  KeyKind kind;
  int32_t itemsize;
  int32_t key_bytes;
  uint64_t inf_key;
  uint64_t first_nan;

  __device__ uint64_t first_nonfinite() const { return inf_key < first_nan ? inf_key : first_nan; }
  __device__ uint64_t sign() const { return uint64_t{1} << (8 * key_bytes - 1); }
};

// Leaves out complex dtypes, and the code that handles them, where kTakesComplex is false.
template <bool kTakesComplex, int I = 0>
__device__ Format format_of(Dtype dtype) {
  constexpr DtypeInfo kInfo = kDtypes[I];
  if constexpr (kInfo.is_complex() && !kTakesComplex) return format_of<false, I + 1>(dtype);
  if constexpr (I + 1 < static_cast<int>(Dtype::kCount)) {
    if (static_cast<int>(dtype) != I) return format_of<kTakesComplex, I + 1>(dtype);
  }
  return {kInfo.kind, kInfo.itemsize, kInfo.key_bytes, kInfo.inf_key, kInfo.first_nan};
}

// Turns the keys of booleans into 0 and 1: until here any non-zero byte stands for `true`.
__device__ inline Extremes finished(const Format& format, Extremes keys) {
  if (format.kind == KeyKind::kBoolean) return {keys.low != 0, keys.high != 0};
  return keys;
}

__device__ inline uint64_t real_key(const Format& format, uint64_t bits) {
  const uint64_t sign = format.sign();
  switch (format.kind) {
    case KeyKind::kSignMagnitude: return bits & (sign - 1);
    case KeyKind::kNegativeZeroNan: return bits == sign ? sign : bits & (sign - 1);
    case KeyKind::kTwosComplement: return bits & sign ? (0 - bits) & (sign | (sign - 1)) : bits;
    default: return bits;
  }
}

__device__ inline double widened(int32_t key_bytes, uint64_t bits) {
  if (key_bytes == 8) return __longlong_as_double(static_cast<long long>(bits));
  if (key_bytes == 4) return __uint_as_float(static_cast<uint32_t>(bits));
  return __uint_as_float(half_to_float_bits(static_cast<uint16_t>(bits)));
}

// The key of |z|, as on the CPU: in double for the narrower formats, and rounded once more. A
// function whose arguments are passed in registers: a reference would put the format in memory.
__device__ __noinline__ inline uint64_t complex_key(int32_t key_bytes, uint64_t inf_key,
                                                    uint64_t first_nan, uint64_t re, uint64_t im) {
  const uint64_t sign = uint64_t{1} << (8 * key_bytes - 1);
  const uint64_t re_key = re & (sign - 1);
  const uint64_t im_key = im & (sign - 1);
  if (re_key == inf_key || im_key == inf_key) return inf_key;
  if (re_key > inf_key || im_key > inf_key) return first_nan;
  const double x = widened(key_bytes, re_key);
  const double y = widened(key_bytes, im_key);
  if (key_bytes == 8) return static_cast<uint64_t>(__double_as_longlong(hypot(x, y)));
  const uint32_t narrow = __float_as_uint(static_cast<float>(sqrt(x * x + y * y)));
  return key_bytes == 4 ? narrow : float_to_half_bits(narrow);
}

// Element `i` of a vector: without an index into registers, which would put them in memory.
__device__ inline uint64_t bits_in_vector(const uint4& v, int32_t i, int32_t bytes) {
  const int32_t at = i * bytes;
  const uint64_t low = v.x | static_cast<uint64_t>(v.y) << 32;
  const uint64_t high = v.z | static_cast<uint64_t>(v.w) << 32;
  const uint64_t bits = (at < 8 ? low : high) >> (8 * (at % 8));
  return bytes == 8 ? bits : bits & ((uint64_t{1} << (8 * bytes)) - 1);
}

// An element's bits; a complex one's imaginary part lies in `im`.
struct Bits {
  uint64_t re;
  uint64_t im;
};

__device__ inline uint64_t load_bytes(const char* from, int32_t count) {
  uint64_t bits = 0;
  for (int32_t i = 0; i < count; ++i) {
    bits |= static_cast<uint64_t>(static_cast<unsigned char>(from[i])) << (8 * i);
  }
  return bits;
}

__device__ inline uint64_t load_bits(const char* from, int32_t bytes, bool is_aligned) {
  if (!is_aligned) return load_bytes(from, bytes);
  switch (bytes) {
    case 1: return *reinterpret_cast<const uint8_t*>(from);
    case 2: return *reinterpret_cast<const uint16_t*>(from);
    case 4: return *reinterpret_cast<const uint32_t*>(from);
    default: return *reinterpret_cast<const uint64_t*>(from);
  }
}

__device__ inline Bits load_element(const Format& format, const char* from, bool is_aligned) {
  Bits bits{load_bits(from, format.key_bytes, is_aligned), 0};
  if (format.itemsize != format.key_bytes) {
    bits.im = load_bits(from + format.key_bytes, format.key_bytes, is_aligned);
  }
  return bits;
}

__device__ inline uint64_t key_of(const Format& format, const Bits& bits) {
  if (format.kind == KeyKind::kComplexMagnitude) {
    return complex_key(format.key_bytes, format.inf_key, format.first_nan, bits.re, bits.im);
  }
  return real_key(format, bits.re);
}

// Counts of the non-finite elements, as in a slot.
struct Counts {
  uint64_t num_nan = 0;
  uint64_t infs = 0;

  __device__ void take_part(const Format& format, uint64_t key, uint64_t bits) {
    if (key != format.inf_key || format.inf_key == kNoKey) return;
    infs |= bits & format.sign() ? Slot::kNegativeInf : Slot::kPositiveInf;
  }
  // Counts nan as isnan and inf as isinf do: each part of a complex element counts.
  __device__ void take(const Format& format, const Bits& bits) {
    if (format.first_nan == kNoKey) return;
    if (format.kind != KeyKind::kComplexMagnitude) {
      const uint64_t key = real_key(format, bits.re);
      num_nan += key >= format.first_nan;
      if (key == format.inf_key) infs += Slot::kOneInf;
      return take_part(format, key, bits.re);
    }
    const uint64_t re_key = bits.re & (format.sign() - 1);
    const uint64_t im_key = bits.im & (format.sign() - 1);
    num_nan += re_key > format.inf_key || im_key > format.inf_key;
    if (re_key == format.inf_key || im_key == format.inf_key) infs += Slot::kOneInf;
    take_part(format, re_key, bits.re);
    take_part(format, im_key, bits.im);
  }
};

}  // namespace overflow_fast::cuda
