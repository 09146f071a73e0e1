// The element types a scan understands, as constants: how an element's magnitude becomes an
// unsigned key, which keys are inf and nan, and how a key is read back as a number.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIP__) || defined(__HIPCC__)
#define OF_HOST_DEVICE __host__ __device__
#else
#define OF_HOST_DEVICE
#endif

namespace overflow_fast {

// One row a dtype: its name here, in torch's C++ and in Python, then its DtypeInfo. The scans, the
// names and the way from torch's dtypes follow from it; `fallback.py` stands in for all of them.
// The 8-bit formats follow the OCP 8-bit floating point and microscaling specifications
// (e4m3fn, e5m2, e8m0fnu) and Graphcore's and AMD's proposal (arXiv:2206.02915; fnuz).
// clang-format off
#define OVERFLOW_FAST_DTYPES(ROW) \
  ROW(kFloat64,        Double,          "float64",         kSignMagnitude,    8, 8, 0x7ff0000000000000, 0x7ff0000000000001, 52, 1023, true) \
  ROW(kFloat32,        Float,           "float32",         kSignMagnitude,    4, 4, 0x7f800000, 0x7f800001, 23, 127, true) \
  ROW(kFloat16,        Half,            "float16",         kSignMagnitude,    2, 2, 0x7c00, 0x7c01, 10, 15, true) \
  ROW(kBFloat16,       BFloat16,        "bfloat16",        kSignMagnitude,    2, 2, 0x7f80, 0x7f81, 7, 127, true) \
  ROW(kFloat8E4M3FN,   Float8_e4m3fn,   "float8_e4m3fn",   kSignMagnitude,    1, 1, kNoKey, 0x7f, 3, 7, true) \
  ROW(kFloat8E5M2,     Float8_e5m2,     "float8_e5m2",     kSignMagnitude,    1, 1, 0x7c, 0x7d, 2, 15, true) \
  ROW(kFloat8E4M3FNUZ, Float8_e4m3fnuz, "float8_e4m3fnuz", kNegativeZeroNan,  1, 1, kNoKey, 0x80, 3, 8, true) \
  ROW(kFloat8E5M2FNUZ, Float8_e5m2fnuz, "float8_e5m2fnuz", kNegativeZeroNan,  1, 1, kNoKey, 0x80, 2, 16, true) \
  ROW(kFloat8E8M0FNU,  Float8_e8m0fnu,  "float8_e8m0fnu",  kUnsigned,         1, 1, kNoKey, 0xff, 0, 127, false) \
  ROW(kComplex128,     ComplexDouble,   "complex128",      kComplexMagnitude, 16, 8, 0x7ff0000000000000, 0x7ff0000000000001, 52, 1023, true) \
  ROW(kComplex64,      ComplexFloat,    "complex64",       kComplexMagnitude, 8, 4, 0x7f800000, 0x7f800001, 23, 127, true) \
  ROW(kComplex32,      ComplexHalf,     "complex32",       kComplexMagnitude, 4, 2, 0x7c00, 0x7c01, 10, 15, true) \
  ROW(kInt64,          Long,            "int64",           kTwosComplement,   8, 8, kNoKey, kNoKey, -1, 0, false) \
  ROW(kInt32,          Int,             "int32",           kTwosComplement,   4, 4, kNoKey, kNoKey, -1, 0, false) \
  ROW(kInt16,          Short,           "int16",           kTwosComplement,   2, 2, kNoKey, kNoKey, -1, 0, false) \
  ROW(kInt8,           Char,            "int8",            kTwosComplement,   1, 1, kNoKey, kNoKey, -1, 0, false) \
  ROW(kUInt64,         UInt64,          "uint64",          kUnsigned,         8, 8, kNoKey, kNoKey, -1, 0, false) \
  ROW(kUInt32,         UInt32,          "uint32",          kUnsigned,         4, 4, kNoKey, kNoKey, -1, 0, false) \
  ROW(kUInt16,         UInt16,          "uint16",          kUnsigned,         2, 2, kNoKey, kNoKey, -1, 0, false) \
  ROW(kUInt8,          Byte,            "uint8",           kUnsigned,         1, 1, kNoKey, kNoKey, -1, 0, false) \
  ROW(kBool,           Bool,            "bool",            kBoolean,          1, 1, kNoKey, kNoKey, -1, 0, false)
// clang-format on

enum class Dtype : uint8_t {
#define OVERFLOW_FAST_NAME(name, ...) name,
  OVERFLOW_FAST_DTYPES(OVERFLOW_FAST_NAME)
#undef OVERFLOW_FAST_NAME
      kCount,
};

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

// Indexed by Dtype.
constexpr DtypeInfo kDtypes[] = {
#define OVERFLOW_FAST_INFO(name, torch_name, python_name, kind, ...) \
  {Dtype::name, KeyKind::kind, __VA_ARGS__},
    OVERFLOW_FAST_DTYPES(OVERFLOW_FAST_INFO)
#undef OVERFLOW_FAST_INFO
};

constexpr const DtypeInfo& dtype_info(Dtype dtype) { return kDtypes[static_cast<int>(dtype)]; }

}  // namespace overflow_fast
