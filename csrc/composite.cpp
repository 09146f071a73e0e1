// The stat by torch operations, for devices without a kernel of ours. Works on bit patterns as
// the kernels do, so that every format and every bit comes out the same.
#include <ATen/ATen.h>

#include "scan.h"
#include "tensor_view.h"

namespace overflow_fast {

namespace {

constexpr int64_t kFlip = std::numeric_limits<int64_t>::min();

at::ScalarType integer_of(int32_t bytes) {
  switch (bytes) {
    case 1: return at::kByte;
    case 2: return at::kShort;
    case 4: return at::kInt;
    default: return at::kLong;
  }
}

// The bits of each element as a non-negative int64, or as the int64 itself for 64-bit elements.
at::Tensor widened_bits(const at::Tensor& tensor, int32_t bytes) {
  const at::Tensor bits = tensor.view(integer_of(bytes)).to(at::kLong);
  return bytes == 8 ? bits : bits.bitwise_and((int64_t{1} << (8 * bytes)) - 1);
}

at::Tensor keys_of(const at::Tensor& tensor, const DtypeInfo& info) {
  const int64_t sign = int64_t{1} << (8 * info.key_bytes - 1);
  switch (info.kind) {
    case KeyKind::kBoolean: return tensor.view(at::kByte).ne(0).to(at::kLong);
    case KeyKind::kTwosComplement: return tensor.to(at::kLong).abs();  // |INT64_MIN|: its own bits
    case KeyKind::kUnsigned: return widened_bits(tensor, info.itemsize);
    case KeyKind::kNegativeZeroNan: {
      const at::Tensor bits = widened_bits(tensor, info.itemsize);
      return at::where(bits.eq(sign), bits, bits.bitwise_and(~sign));
    }
    default: return widened_bits(tensor, info.itemsize).bitwise_and(~sign);
  }
}

struct Flags {
  at::Tensor nan, inf, positive_inf, negative_inf;
};

// |z| as the kernels define it: in double where the format is narrower, rounded once.
at::Tensor complex_keys(const at::Tensor& tensor, const DtypeInfo& info, Flags& flags) {
  const at::Tensor parts = at::view_as_real(tensor.resolve_conj());
  const at::Tensor wide = parts.to(at::kDouble);
  flags = {wide.isnan().any(-1), wide.isinf().any(-1), wide.isposinf(), wide.isneginf()};
  const at::Tensor re = wide.select(-1, 0), im = wide.select(-1, 1);
  const at::Tensor magnitude = info.key_bytes == 8 ? at::hypot(re, im) : (re * re + im * im).sqrt();
  const at::Tensor keys = widened_bits(magnitude.to(parts.scalar_type()), info.key_bytes);
  const at::Tensor with_nan = keys.masked_fill(flags.nan, static_cast<int64_t>(info.first_nan));
  return with_nan.masked_fill(flags.inf, static_cast<int64_t>(info.inf_key));
}

Flags real_flags(const at::Tensor& tensor, const at::Tensor& keys, const DtypeInfo& info) {
  Flags flags;
  if (info.first_nan != kNoKey) flags.nan = keys.ge(static_cast<int64_t>(info.first_nan));
  if (info.inf_key != kNoKey) {
    flags.inf = keys.eq(static_cast<int64_t>(info.inf_key));
    const int64_t sign = int64_t{1} << (8 * info.key_bytes - 1);
    const at::Tensor negative = widened_bits(tensor, info.itemsize).bitwise_and(sign).ne(0);
    flags.positive_inf = flags.inf.logical_and(negative.logical_not());
    flags.negative_inf = flags.inf.logical_and(negative);
  }
  return flags;
}

// The `infs` word of a slot.
at::Tensor infs_word(const Flags& flags) {
  return flags.inf.sum() * static_cast<int64_t>(Slot::kOneInf) +
         flags.positive_inf.any() * static_cast<int64_t>(Slot::kPositiveInf) +
         flags.negative_inf.any() * static_cast<int64_t>(Slot::kNegativeInf);
}

}  // namespace

at::Tensor stat_composite(const at::Tensor& tensor) {
  const auto options = tensor.options().dtype(at::kLong);
  if (tensor.numel() == 0) {
    at::Tensor empty = at::zeros({4}, options);
    empty[0].fill_(-1);
    return empty;
  }
  const DtypeInfo& info = dtype_info(*to_dtype(tensor.scalar_type()));
  Flags flags;
  at::Tensor keys;
  if (info.is_complex()) {
    keys = complex_keys(tensor, info, flags);
  } else {
    keys = keys_of(tensor, info);
    flags = real_flags(tensor, keys, info);
  }
  const at::Tensor flipped = keys.bitwise_xor(kFlip);
  const at::Tensor none = at::zeros({}, options);
  return at::stack({flipped.amin().bitwise_xor(kFlip), flipped.amax().bitwise_xor(kFlip),
                    flags.nan.defined() ? flags.nan.sum() : none,
                    flags.inf.defined() ? infs_word(flags) : none});
}

}  // namespace overflow_fast
