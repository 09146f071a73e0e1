// The element types a scan understands, as constants: how an element's magnitude becomes an
// unsigned key, which keys are inf and nan, and how a key is read back as a number.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define OF_HOST_DEVICE __host__ __device__
#else
#define OF_HOST_DEVICE
#endif

namespace overflow_fast {

// clang-format off
enum class Dtype : uint8_t {
  kFloat64, kFloat32, kFloat16, kBFloat16,
  kFloat8E4M3FN, kFloat8E5M2, kFloat8E4M3FNUZ, kFloat8E5M2FNUZ, kFloat8E8M0FNU,
  kComplex128, kComplex64, kComplex32,
  kInt64, kInt32, kInt16, kInt8, kUInt64, kUInt32, kUInt16, kUInt8, kBool,
  kCount,
};
// clang-format on

// How the bits of an element map to its key. Keys order as magnitudes do.
enum class KeyKind : uint8_t {
  kSignMagnitude,     // IEEE-like: strip the sign bit
  kNegativeZeroNan,   // fnuz: the pattern of -0 is the only nan, and stays the largest key
  kUnsigned,          // the bits themselves (uintN, e8m0)
  kTwosComplement,    // |x| as an unsigned number: |INT_MIN| does not wrap
  kBoolean,           // any non-zero byte is 1
  kComplexMagnitude,  // the bits of |z| in the component's format
};

constexpr uint64_t kNoKey = ~uint64_t{0};

struct DtypeInfo {
  Dtype dtype;
  KeyKind kind;
  int32_t itemsize;    // bytes of an element
  int32_t key_bytes;   // bytes of its key
  uint64_t inf_key;    // the key of inf, kNoKey if the format has none
  uint64_t first_nan;  // the smallest key that is nan, kNoKey if there is none
  // The key as a number: `mantissa` explicit bits and `bias`. mantissa < 0: an integer.
  int32_t mantissa;
  int32_t bias;
  bool has_subnormals;

  OF_HOST_DEVICE constexpr bool is_integer() const { return mantissa < 0; }
  OF_HOST_DEVICE constexpr bool is_complex() const { return kind == KeyKind::kComplexMagnitude; }
  // Keys from here on are not finite.
  OF_HOST_DEVICE constexpr uint64_t first_nonfinite() const {
    return inf_key < first_nan ? inf_key : first_nan;
  }
};

// The 8-bit formats follow the OCP 8-bit floating point and microscaling specifications
// (e4m3fn, e5m2, e8m0fnu) and Graphcore's and AMD's proposal (arXiv:2206.02915; fnuz).
constexpr DtypeInfo kDtypes[] = {
    {Dtype::kFloat64, KeyKind::kSignMagnitude, 8, 8, 0x7ff0000000000000, 0x7ff0000000000001, 52,
     1023, true},
    {Dtype::kFloat32, KeyKind::kSignMagnitude, 4, 4, 0x7f800000, 0x7f800001, 23, 127, true},
    {Dtype::kFloat16, KeyKind::kSignMagnitude, 2, 2, 0x7c00, 0x7c01, 10, 15, true},
    {Dtype::kBFloat16, KeyKind::kSignMagnitude, 2, 2, 0x7f80, 0x7f81, 7, 127, true},
    {Dtype::kFloat8E4M3FN, KeyKind::kSignMagnitude, 1, 1, kNoKey, 0x7f, 3, 7, true},
    {Dtype::kFloat8E5M2, KeyKind::kSignMagnitude, 1, 1, 0x7c, 0x7d, 2, 15, true},
    {Dtype::kFloat8E4M3FNUZ, KeyKind::kNegativeZeroNan, 1, 1, kNoKey, 0x80, 3, 8, true},
    {Dtype::kFloat8E5M2FNUZ, KeyKind::kNegativeZeroNan, 1, 1, kNoKey, 0x80, 2, 16, true},
    {Dtype::kFloat8E8M0FNU, KeyKind::kUnsigned, 1, 1, kNoKey, 0xff, 0, 127, false},
    {Dtype::kComplex128, KeyKind::kComplexMagnitude, 16, 8, 0x7ff0000000000000, 0x7ff0000000000001,
     52, 1023, true},
    {Dtype::kComplex64, KeyKind::kComplexMagnitude, 8, 4, 0x7f800000, 0x7f800001, 23, 127, true},
    {Dtype::kComplex32, KeyKind::kComplexMagnitude, 4, 2, 0x7c00, 0x7c01, 10, 15, true},
    {Dtype::kInt64, KeyKind::kTwosComplement, 8, 8, kNoKey, kNoKey, -1, 0, false},
    {Dtype::kInt32, KeyKind::kTwosComplement, 4, 4, kNoKey, kNoKey, -1, 0, false},
    {Dtype::kInt16, KeyKind::kTwosComplement, 2, 2, kNoKey, kNoKey, -1, 0, false},
    {Dtype::kInt8, KeyKind::kTwosComplement, 1, 1, kNoKey, kNoKey, -1, 0, false},
    {Dtype::kUInt64, KeyKind::kUnsigned, 8, 8, kNoKey, kNoKey, -1, 0, false},
    {Dtype::kUInt32, KeyKind::kUnsigned, 4, 4, kNoKey, kNoKey, -1, 0, false},
    {Dtype::kUInt16, KeyKind::kUnsigned, 2, 2, kNoKey, kNoKey, -1, 0, false},
    {Dtype::kUInt8, KeyKind::kUnsigned, 1, 1, kNoKey, kNoKey, -1, 0, false},
    {Dtype::kBool, KeyKind::kBoolean, 1, 1, kNoKey, kNoKey, -1, 0, false},
};

constexpr bool dtypes_stand_in_order() {
  for (int i = 0; i < static_cast<int>(Dtype::kCount); ++i) {
    if (static_cast<int>(kDtypes[i].dtype) != i) return false;
  }
  return sizeof(kDtypes) / sizeof(kDtypes[0]) == static_cast<int>(Dtype::kCount);
}
static_assert(dtypes_stand_in_order(), "kDtypes is indexed by Dtype");

constexpr const DtypeInfo& dtype_info(Dtype dtype) { return kDtypes[static_cast<int>(dtype)]; }

}  // namespace overflow_fast
