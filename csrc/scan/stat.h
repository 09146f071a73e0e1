// The definition of a stat and of how two stats combine, which every backend shares.
//
// A slot holds the extremes of a tensor's keys (dtype.h), so magnitudes are compared as unsigned
// integers and nothing is converted; the counts are exact and are touched only by tensors that
// hold a non-finite value.
#pragma once

#include <cmath>
#include <cstdint>

#include "dtype.h"

namespace overflow_fast {

struct Slot {
  uint64_t min_key = kNoKey;
  uint64_t max_key = 0;
  uint64_t num_nan = 0;
  // (number of infs << 2) | (any -inf << 1) | (any +inf), so that a slot stays 32 bytes.
  uint64_t infs = 0;

  OF_HOST_DEVICE constexpr bool is_empty() const { return min_key > max_key; }
  OF_HOST_DEVICE constexpr bool has_nan() const { return num_nan != 0; }
  OF_HOST_DEVICE constexpr bool has_inf() const { return infs != 0; }
  OF_HOST_DEVICE constexpr bool is_finite() const { return (num_nan | infs) == 0; }
  OF_HOST_DEVICE constexpr uint64_t num_inf() const { return infs >> 2; }
  // The kinds that occurred, out of kPositiveInf, kNegativeInf and kNan.
  OF_HOST_DEVICE constexpr uint64_t nonfinite_kinds() const {
    return (infs & (kPositiveInf | kNegativeInf)) | (has_nan() ? kNan : 0);
  }

  static constexpr uint64_t kPositiveInf = 1;
  static constexpr uint64_t kNegativeInf = 2;
  static constexpr uint64_t kNan = 4;  // of kinds; in `infs` this is kOneInf
  static constexpr uint64_t kOneInf = 4;
};
static_assert(sizeof(Slot) == 32, "a slot is four 64-bit words on every backend");

OF_HOST_DEVICE constexpr uint64_t combine_infs(uint64_t a, uint64_t b) {
  return ((a | b) & 3) | ((a & ~uint64_t{3}) + (b & ~uint64_t{3}));
}

OF_HOST_DEVICE constexpr void combine(Slot& into, const Slot& from) {
  into.min_key = from.min_key < into.min_key ? from.min_key : into.min_key;
  into.max_key = from.max_key > into.max_key ? from.max_key : into.max_key;
  into.num_nan += from.num_nan;
  into.infs = combine_infs(into.infs, from.infs);
}

// The number a key stands for. A key above inf decodes to nan.
inline double decode_key(const DtypeInfo& info, uint64_t key) {
  if (info.is_integer()) return static_cast<double>(key);
  if (key >= info.first_nan) return std::nan("");
  if (key == info.inf_key) return HUGE_VAL;
  const auto exponent = static_cast<int>(key >> info.mantissa);
  const uint64_t fraction = key & ((uint64_t{1} << info.mantissa) - 1);
  const bool subnormal = exponent == 0 && info.has_subnormals;
  const uint64_t significand = subnormal ? fraction : fraction | (uint64_t{1} << info.mantissa);
  return std::ldexp(static_cast<double>(significand),
                    (subnormal ? 1 : exponent) - info.bias - info.mantissa);
}

}  // namespace overflow_fast
