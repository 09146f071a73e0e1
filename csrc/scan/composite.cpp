// Stats by torch operations, for devices without a kernel here. Works on bit patterns as the
// kernels do, so that every format gives the same stat, bit for bit.
//
// Elements stay in their own width: their bits become signed integers of that width that order as
// the keys do, and those are reduced. Large tensors are scanned in pieces. No reduction over
// elements is of 64 bits: Apple's GPUs do them slowly, some releases of torch wrongly
// (pytorch/pytorch#187976).
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "scan.h"
#include "tensor_view.h"

namespace overflow_fast {

namespace {

constexpr int64_t kMaxTemporaries = int64_t{64} << 20;
constexpr int64_t kMinTemporaries = int64_t{64} << 10;  // smaller pieces do not pay
constexpr int64_t kTop = std::numeric_limits<int64_t>::min();
constexpr int64_t kTopOfWord = std::numeric_limits<int32_t>::min();

at::ScalarType signed_of(int32_t bytes) {
  switch (bytes) {
    case 1: return at::kChar;
    case 2: return at::kShort;
    case 4: return at::kInt;
    default: return at::kLong;
  }
}

// The top bit of a key, as a signed integer of the key's width has it.
int64_t top_bit(const DtypeInfo& info) { return kTop >> (64 - 8 * info.key_bytes); }

// 0-d tensors on the device, int64: the extremes of some keys with their top bit flipped, so that
// they order as signed integers, and the counts of nans and infs, undefined where the format has
// none.
struct Found {
  enum { kNan, kInf, kPositive, kNegative, kNumCounts };
  at::Tensor low, high;
  std::array<at::Tensor, kNumCounts> counts;

  void take(const Found& other) {
    low = low.defined() ? at::minimum(low, other.low) : other.low;
    high = high.defined() ? at::maximum(high, other.high) : other.high;
    for (int i = 0; i < kNumCounts; ++i) {
      counts[i] = counts[i].defined() ? counts[i] + other.counts[i] : other.counts[i];
    }
  }
};

// The number of true elements of a fresh mask. sum() makes an int64 of every element first, so
// groups of them are summed as bytes before.
at::Tensor count(const at::Tensor& mask) {
  constexpr int64_t kGroup = 64;
  const int64_t whole = mask.numel() / kGroup * kGroup;
  const at::Tensor bytes = mask.view(at::kChar).as_strided({mask.numel()}, {1});
  const at::Tensor rest = bytes.narrow(0, whole, mask.numel() - whole).sum();
  if (whole == 0) return rest;
  return rest + bytes.narrow(0, 0, whole).view({-1, kGroup}).sum(1, false, at::kChar).sum();
}

enum class End { kLow, kHigh };

at::Tensor extreme(const at::Tensor& numbers, End end) {
  return end == End::kLow ? numbers.amin() : numbers.amax();
}

// The smallest or largest of int64s by their halves: of the upper ones, and of the lower ones
// where the upper one is that.
at::Tensor extreme_by_halves(const at::Tensor& numbers, End end) {
  const at::Tensor words = numbers.unsqueeze(-1).view(at::kInt);
  const at::Tensor uppers = words.select(-1, 1);
  const at::Tensor upper = extreme(uppers, end);
  at::Tensor lowers = words.select(-1, 0).bitwise_xor(kTopOfWord);
  lowers.masked_fill_(uppers.ne(upper), end == End::kLow ? ~kTopOfWord : kTopOfWord);
  const at::Tensor lower = extreme(lowers, end).bitwise_xor_(kTopOfWord).to(at::kLong);
  return upper.to(at::kLong).mul_(int64_t{1} << 32).bitwise_or_(lower.bitwise_and_(0xffffffff));
}

at::Tensor extreme_of(const at::Tensor& numbers, End end) {
  if (numbers.scalar_type() == at::kLong) return extreme_by_halves(numbers, end);
  return extreme(numbers, end);
}

// A key as an int64 with its top bit flipped.
at::Tensor flipped(const at::Tensor& key, const DtypeInfo& info) {
  const auto mask = static_cast<int64_t>(~uint64_t{0} >> (64 - 8 * info.key_bytes));
  return key.to(at::kLong).bitwise_and(mask).bitwise_xor_(kTop);
}

// Signed integers that order as the keys, and differ from them in the bits of `flip` only.
at::Tensor ordered_bits(const at::Tensor& bits, const DtypeInfo& info, int64_t& flip) {
  const int64_t top = top_bit(info);
  flip = 0;
  if (info.kind == KeyKind::kBoolean) return bits.ne(0).view(at::kChar);
  if (info.kind == KeyKind::kSignMagnitude) return bits.bitwise_and(~top);
  flip = top;
  if (info.kind == KeyKind::kUnsigned) return bits.bitwise_xor(top);
  return bits.bitwise_or(top).masked_fill_(bits.eq(top), 0);  // the nan of fnuz, above all others
}

// The largest magnitude is that of the smallest or of the largest number. With sign bits flipped
// these are the numbers next to zero: the smallest magnitude.
Found scan_signed(const at::Tensor& bits, const DtypeInfo& info) {
  const auto magnitude = [&](const at::Tensor& x) {
    return x.to(at::kLong).abs().bitwise_xor_(kTop);  // |INT64_MIN|: its own bits
  };
  Found found;
  found.high =
      at::maximum(magnitude(extreme_of(bits, End::kLow)), magnitude(extreme_of(bits, End::kHigh)));
  const int64_t top = top_bit(info);
  const at::Tensor mirrored = bits.bitwise_xor(top);
  const auto near = [&](End end) { return magnitude(extreme_of(mirrored, end).bitwise_xor(top)); };
  found.low = at::minimum(near(End::kLow), near(End::kHigh));
  return found;
}

Found scan_real(const at::Tensor& tensor, const DtypeInfo& info) {
  const at::Tensor bits = tensor.view(signed_of(info.itemsize));
  if (info.kind == KeyKind::kTwosComplement) return scan_signed(bits, info);
  int64_t flip = 0;
  at::Tensor keys = ordered_bits(bits, info, flip);
  Found found{flipped(extreme_of(keys, End::kLow).bitwise_xor(flip), info),
              flipped(extreme_of(keys, End::kHigh).bitwise_xor(flip), info),
              {}};
  if (info.first_nan != kNoKey && info.itemsize == 1) {
    found.counts[Found::kNan] = count(keys.ge(static_cast<int64_t>(info.first_nan) ^ flip));
  }
  keys.reset();  // one temporary at a time
  if (info.first_nan != kNoKey && info.itemsize != 1) {
    found.counts[Found::kNan] = count(tensor.ne(tensor));
  }
  if (info.inf_key == kNoKey) return found;
  const auto inf = static_cast<int64_t>(info.inf_key);
  found.counts[Found::kPositive] = count(bits.eq(inf));
  found.counts[Found::kNegative] = count(bits.eq(inf | top_bit(info)));
  found.counts[Found::kInf] = found.counts[Found::kPositive] + found.counts[Found::kNegative];
  return found;
}

// |z| as the kernels define it: in double where the format is narrower, rounded once.
at::Tensor magnitudes(const at::Tensor& parts, const DtypeInfo& info) {
  if (info.key_bytes == 8) return at::hypot(parts.select(-1, 0), parts.select(-1, 1));
  const at::Tensor squares = parts.to(at::kDouble).square_();
  return (squares.select(-1, 0) + squares.select(-1, 1)).sqrt_().to(parts.scalar_type());
}

Found scan_complex(const at::Tensor& tensor, const DtypeInfo& info) {
  const at::Tensor parts = at::view_as_real(tensor);
  const at::Tensor bits = parts.view(signed_of(info.key_bytes));
  const auto any_part = [](const at::Tensor& mask) {
    return mask.select(-1, 0).logical_or(mask.select(-1, 1));
  };
  const auto inf = static_cast<int64_t>(info.inf_key);
  const at::Tensor positive = bits.eq(inf), negative = bits.eq(inf | top_bit(info));
  const at::Tensor is_inf = any_part(positive.logical_or(negative));
  const at::Tensor is_nan = any_part(parts.ne(parts));
  at::Tensor keys = magnitudes(parts, info).view(bits.scalar_type());
  keys.masked_fill_(is_nan, static_cast<int64_t>(info.first_nan)).masked_fill_(is_inf, inf);
  return {flipped(extreme_of(keys, End::kLow), info),
          flipped(extreme_of(keys, End::kHigh), info),
          {count(is_nan), count(is_inf), count(positive), count(negative)}};
}

// Bytes that a scan allocates for an element, all its temporaries together.
int64_t temporary_bytes(const DtypeInfo& info) {
  if (info.is_complex()) return info.key_bytes == 8 ? 20 : 36;
  if (info.itemsize == 8) return 14;                             // numbers, lower halves, a mask
  if (info.itemsize == 1 && info.first_nan != kNoKey) return 3;  // keys, a mask, its groups
  return info.itemsize;
}

// Calls visit with parts of at most max_numel elements, cut where the strides are largest.
void in_pieces(const at::Tensor& tensor, int64_t max_numel,
               const std::function<void(const at::Tensor&)>& visit) {
  if (tensor.numel() <= max_numel) return visit(tensor);
  int64_t dim = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    const bool is_shorter = tensor.size(i) == 1 || tensor.stride(i) < tensor.stride(dim);
    if (tensor.size(dim) == 1 || !is_shorter) dim = i;
  }
  const int64_t slice = tensor.numel() / tensor.size(dim);
  const int64_t step = std::max<int64_t>(1, max_numel / slice);
  for (int64_t begin = 0; begin < tensor.size(dim); begin += step) {
    const int64_t length = std::min(step, tensor.size(dim) - begin);
    in_pieces(tensor.narrow(dim, begin, length), max_numel, visit);
  }
}

// A tensor as it lies in memory: not negated, not conjugated, and expanded dimensions once.
at::Tensor memory_of(at::Tensor tensor) {
  if (tensor.is_conj()) tensor = tensor.conj();
  if (tensor.is_neg()) tensor = tensor._neg_view();
  for (int64_t dim = tensor.dim(); dim-- > 0;) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) tensor = tensor.select(dim, 0);
  }
  return tensor;
}

Found scan(const at::Tensor& all) {
  const at::Tensor tensor = memory_of(all.detach());
  const DtypeInfo& info = dtype_info(*to_dtype(tensor.scalar_type()));
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const int64_t room = std::clamp(bytes, kMinTemporaries, kMaxTemporaries);
  Found found;
  in_pieces(tensor, std::max<int64_t>(1, room / temporary_bytes(info)), [&](const at::Tensor& t) {
    found.take(info.is_complex() ? scan_complex(t, info) : scan_real(t, info));
  });
  return found;
}

}  // namespace

at::Tensor stats_composite(at::TensorList tensors) {
  const auto options = tensors.front().options().dtype(at::kLong);
  const at::Tensor none = at::zeros({}, options);
  std::vector<at::Tensor> words;
  for (const at::Tensor& tensor : tensors) {
    Found found;
    if (tensor.numel() != 0) found = scan(tensor);
    words.push_back(found.low.defined() ? found.low : at::full({}, ~kTop, options));
    words.push_back(found.high.defined() ? found.high : at::full({}, kTop, options));
    for (const at::Tensor& number : found.counts) words.push_back(number.defined() ? number : none);
  }
  const at::Tensor table = at::stack(words).view({-1, 2 + Found::kNumCounts});
  const auto column = [&](int64_t i) { return table.select(1, i); };
  const auto count_of = [&](int i) { return column(2 + i); };
  const auto sign = [&](int i, uint64_t bit) {
    return count_of(i).ne(0).to(at::kLong).mul_(static_cast<int64_t>(bit));
  };
  const at::Tensor infs = count_of(Found::kInf).mul(static_cast<int64_t>(Slot::kOneInf)) +
                          sign(Found::kPositive, Slot::kPositiveInf) +
                          sign(Found::kNegative, Slot::kNegativeInf);
  return at::stack(
      {column(0).bitwise_xor(kTop), column(1).bitwise_xor(kTop), count_of(Found::kNan), infs}, 1);
}

}  // namespace overflow_fast
