// Stats by torch operations, for devices without a kernel here. Works on bit patterns as the
// kernels do, so that every format gives the same stat, bit for bit.
//
// Elements stay in their own width: their bits become signed integers of that width that order as
// the keys do, and those are reduced. Small tensors of one dtype and size are joined and reduced
// together, since a device takes microseconds for each operation; large ones are scanned in pieces.
// No reduction over elements is of 64 bits: Apple's GPUs do them slowly, some releases of torch
// wrongly (pytorch/pytorch#187976).
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "scan.h"
#include "tensor_view.h"

namespace overflow_fast {

namespace {

constexpr int64_t kMaxTemporaries = int64_t{64} << 20;
constexpr int64_t kMinTemporaries = int64_t{64} << 10;  // smaller pieces do not pay
// Tensors that are joined have at most 8 MiB together: eight of the largest ones that are joined,
// which share the 14 operations of a reduction.
constexpr int64_t kMaxJoined = int64_t{8} << 20;
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

// A key as the signed integer of its width that has its bits.
int64_t as_signed(uint64_t key, const DtypeInfo& info) {
  const int shift = 64 - 8 * info.key_bytes;
  return static_cast<int64_t>(key << shift) >> shift;
}

// torch's type of elements, or of the parts of complex ones, of more than a byte.
at::ScalarType float_type_of(const DtypeInfo& info) {
  if (info.dtype == Dtype::kBFloat16) return at::kBFloat16;
  return info.key_bytes == 8 ? at::kDouble : info.key_bytes == 4 ? at::kFloat : at::kHalf;
}

// Of rows of elements: the extremes of their keys, with their top bit flipped so that they order as
// signed integers, and the counts of nans and infs, undefined where the format has none. Each is an
// int64 for a row, on the device.
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

// The dimensions of an element's place in its row.
std::vector<int64_t> within_rows(const at::Tensor& rows) {
  std::vector<int64_t> dims;
  for (int64_t dim = 1; dim < rows.dim(); ++dim) dims.push_back(dim);
  return dims;
}

// The number of true elements in each row of a fresh mask. sum() makes an int64 of every element
// first, so groups of a single row's are summed as bytes before.
at::Tensor count(const at::Tensor& mask) {
  constexpr int64_t kGroup = 64;  // a byte holds up to 127
  if (mask.size(0) != 1) return mask.sum(within_rows(mask));
  const int64_t whole = mask.numel() / kGroup * kGroup;
  const at::Tensor bytes = mask.view(at::kChar).as_strided({1, mask.numel()}, {mask.numel(), 1});
  if (whole == 0) return bytes.sum(1);
  const at::Tensor groups = bytes.narrow(1, 0, whole).view({1, -1, kGroup});
  const at::Tensor sums = groups.sum(2, false, at::kChar).sum(1);
  if (whole == mask.numel()) return sums;
  return sums + bytes.narrow(1, whole, mask.numel() - whole).sum(1);
}

enum class End { kLow, kHigh };

at::Tensor extreme(const at::Tensor& rows, End end) {
  const std::vector<int64_t> dims = within_rows(rows);
  return end == End::kLow ? rows.amin(dims) : rows.amax(dims);
}

// The smallest or largest of int64s by their halves: of the upper ones, and of the lower ones
// where the upper one is that.
at::Tensor extreme_by_halves(const at::Tensor& rows, End end) {
  const at::Tensor words = rows.unsqueeze(-1).view(at::kInt);
  const at::Tensor uppers = words.select(-1, 1);
  const at::Tensor upper = extreme(uppers, end);
  std::vector<int64_t> broad(static_cast<size_t>(rows.dim()), 1);
  broad[0] = rows.size(0);
  at::Tensor lowers = words.select(-1, 0).bitwise_xor(kTopOfWord);
  lowers.masked_fill_(uppers.ne(upper.view(broad)), end == End::kLow ? ~kTopOfWord : kTopOfWord);
  const at::Tensor lower = extreme(lowers, end).bitwise_xor_(kTopOfWord).to(at::kLong);
  return upper.to(at::kLong).mul_(int64_t{1} << 32).bitwise_or_(lower.bitwise_and_(0xffffffff));
}

at::Tensor extreme_of(const at::Tensor& rows, End end) {
  if (rows.scalar_type() == at::kLong) return extreme_by_halves(rows, end);
  return extreme(rows, end);
}

// A key as an int64 with its top bit flipped, from the signed integer that orders as it does and
// differs from it in the bits of `flip` only.
at::Tensor flipped(const at::Tensor& ordered, int64_t flip, const DtypeInfo& info) {
  if (flip == 0) return ordered.to(at::kLong).bitwise_xor(kTop);  // its sign bit is 0
  const auto mask = static_cast<int64_t>(~uint64_t{0} >> (64 - 8 * info.key_bytes));
  return ordered.bitwise_xor(flip).to(at::kLong).bitwise_and_(mask).bitwise_xor_(kTop);
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

Found scan_real(const at::Tensor& bits, const DtypeInfo& info) {
  if (info.kind == KeyKind::kTwosComplement) return scan_signed(bits, info);
  int64_t flip = 0;
  at::Tensor keys = ordered_bits(bits, info, flip);
  Found found{flipped(extreme_of(keys, End::kLow), flip, info),
              flipped(extreme_of(keys, End::kHigh), flip, info),
              {}};
  if (info.first_nan != kNoKey && info.itemsize == 1) {
    // A scalar of the keys' width: some devices refuse, or wrap, any other.
    found.counts[Found::kNan] = count(keys.ge(as_signed(info.first_nan, info) ^ flip));
  }
  keys.reset();  // one temporary at a time
  if (info.first_nan != kNoKey && info.itemsize != 1) {
    const at::Tensor numbers = bits.view(float_type_of(info));
    found.counts[Found::kNan] = count(numbers.ne(numbers));
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

Found scan_complex(const at::Tensor& bits, const DtypeInfo& info) {
  const at::Tensor parts = bits.view(float_type_of(info));
  const auto any_part = [](const at::Tensor& mask) {
    return mask.select(-1, 0).logical_or(mask.select(-1, 1));
  };
  const auto inf = static_cast<int64_t>(info.inf_key);
  const at::Tensor positive = bits.eq(inf), negative = bits.eq(inf | top_bit(info));
  const at::Tensor is_inf = any_part(positive.logical_or(negative));
  const at::Tensor is_nan = any_part(parts.ne(parts));
  at::Tensor keys = magnitudes(parts, info).view(bits.scalar_type());
  keys.masked_fill_(is_nan, static_cast<int64_t>(info.first_nan)).masked_fill_(is_inf, inf);
  return {flipped(extreme_of(keys, End::kLow), 0, info),
          flipped(extreme_of(keys, End::kHigh), 0, info),
          {count(is_nan), count(is_inf), count(positive), count(negative)}};
}

Found scan_rows(const at::Tensor& rows, const DtypeInfo& info) {
  return info.is_complex() ? scan_complex(rows, info) : scan_real(rows, info);
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

// Its words, of which stats are made, as a row of int64s: the counts in the order of Found, behind
// the two extremes.
constexpr int64_t kNumWords = 2 + Found::kNumCounts;

at::Tensor words_of(const Found& found, int64_t num_rows, const at::TensorOptions& options) {
  std::vector<at::Tensor> columns{found.low, found.high};
  at::Tensor none;
  for (const at::Tensor& number : found.counts) {
    if (!number.defined() && !none.defined()) none = at::zeros({num_rows}, options);
    columns.push_back(number.defined() ? number : none);
  }
  return at::stack(columns, 1);
}

// The words of a tensor alone.
at::Tensor scan_alone(const Bits& one) {
  const DtypeInfo& info = dtype_info(one.dtype);
  const auto bytes = static_cast<int64_t>(one.bits.nbytes());
  const int64_t room = std::clamp(bytes, kMinTemporaries, kMaxTemporaries);
  Found found;
  const auto num = std::max<int64_t>(1, room / temporary_bytes(info));
  const at::Tensor row = one.bits.unsqueeze(0);
  const bool is_one = one.bits.dim() == info.is_complex();
  in_pieces(is_one ? row.unsqueeze(0) : row, info.is_complex() ? 2 * num : num,
            [&](const at::Tensor& piece) { found.take(scan_rows(piece, info)); });
  return words_of(found, 1, one.bits.options().dtype(at::kLong));
}

// Copies a piece to the host, or parts of it where the device has no memory for that, and combines
// their stats into `slot`.
void scan_on_host(const at::Tensor& piece, Slot& slot) {
  constexpr int64_t kLeast = 256;  // elements: no device lacks memory for a page
  at::Tensor host;
  try {
    host = piece.cpu();
  } catch (const c10::OutOfMemoryError&) {
    if (piece.numel() <= kLeast) throw;
    return in_pieces(piece, std::max(kLeast, piece.numel() / 16),
                     [&](const at::Tensor& part) { scan_on_host(part, slot); });
  }
  View view{};
  view_of(host, view);
  scan_cpu(view, slot);
}

at::Tensor no_words(const at::TensorOptions& options) {
  at::Tensor words = at::zeros({1, kNumWords}, options.dtype(at::kLong));
  words.select(1, 0).fill_(~kTop);
  words.select(1, 1).fill_(kTop);
  return words;
}

}  // namespace

Bits bits_of(const at::Tensor& all) {
  const at::Tensor tensor = memory_of(all);
  const Dtype dtype = *to_dtype(tensor.scalar_type());
  const DtypeInfo& info = dtype_info(dtype);
  const at::Tensor numbers = info.is_complex() ? at::view_as_real(tensor) : tensor;
  return {numbers.view(signed_of(info.key_bytes)), dtype};
}

at::Tensor flat(const Bits& each) {
  const int64_t width = dtype_info(each.dtype).is_complex() ? 2 : 1;
  if (!each.bits.is_non_overlapping_and_dense()) return each.bits.reshape({-1, width});
  return each.bits.as_strided({each.bits.numel() / width, width}, {width, 1});
}

bool is_joined(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes()) <= kMaxJoined / 8;
}

at::Tensor words_alone(const Bits& each) {
  return each.bits.numel() == 0 ? no_words(each.bits.options()) : scan_alone(each);
}

at::Tensor stats_of(const std::vector<ToReduce>& all) {
  std::map<std::pair<Dtype, int64_t>, std::vector<size_t>> alike;
  std::vector<at::Tensor> words(all.size());  // a row each
  for (size_t i = 0; i < all.size(); ++i) {
    words[i] = all[i].words;
    if (words[i].defined()) continue;
    const at::Tensor& bits = all[i].each.bits;
    const auto bytes = static_cast<int64_t>(bits.nbytes());
    if (bytes == 0 || bytes > kMaxJoined / 8) {
      words[i] = words_alone(all[i].each);
    } else {
      alike[{all[i].each.dtype, bits.numel()}].push_back(i);
    }
  }
  for (const auto& [key, members] : alike) {
    const auto bytes = static_cast<int64_t>(all[members.front()].each.bits.nbytes());
    const auto most = static_cast<size_t>(kMaxJoined / bytes);
    for (size_t begin = 0; begin < members.size(); begin += most) {
      const size_t count = std::min(most, members.size() - begin);
      if (count == 1) {
        words[members[begin]] = words_alone(all[members[begin]].each);
        continue;
      }
      std::vector<at::Tensor> rows;
      for (size_t i = 0; i < count; ++i) rows.push_back(flat(all[members[begin + i]].each));
      const auto num_rows = static_cast<int64_t>(count);
      const at::Tensor joined = at::stack(rows);
      const at::Tensor found =
          words_of(scan_rows(dtype_info(key.first).is_complex() ? joined : joined.squeeze(-1),
                             dtype_info(key.first)),
                   num_rows, joined.options().dtype(at::kLong));
      for (int64_t i = 0; i < num_rows; ++i) {
        words[members[begin + static_cast<size_t>(i)]] = found.narrow(0, i, 1);
      }
    }
  }
  const at::Tensor table = words.size() == 1 ? words.front() : at::cat(words);
  const auto count_of = [&](int i) { return table.select(1, 2 + i); };
  const at::Tensor infs =
      count_of(Found::kInf)
          .mul(static_cast<int64_t>(Slot::kOneInf))
          .add_(count_of(Found::kPositive).ne(0), static_cast<int64_t>(Slot::kPositiveInf))
          .add_(count_of(Found::kNegative).ne(0), static_cast<int64_t>(Slot::kNegativeInf));
  const at::Tensor ends = table.narrow(1, 0, 2).bitwise_xor(kTop);
  return at::cat({ends, table.narrow(1, 2, 1), infs.unsqueeze(1)}, 1);
}

Slot scan_anyhow(const at::Tensor& tensor) {
  try {
    const at::Tensor host = stats_composite({tensor}).cpu();
    return *static_cast<const Slot*>(host.const_data_ptr());
  } catch (const std::exception&) {  // in smaller pieces, below
  }
  Slot slot;
  constexpr int64_t kPieceBytes = int64_t{16} << 20;  // of host memory, at most
  in_pieces(memory_of(tensor), kPieceBytes / static_cast<int64_t>(tensor.itemsize()),
            [&](const at::Tensor& piece) { scan_on_host(piece, slot); });
  return slot;
}

at::Tensor stats_composite(at::TensorList tensors) {
  std::vector<ToReduce> all;
  for (const at::Tensor& tensor : tensors) all.push_back({bits_of(tensor.detach()), {}});
  return stats_of(all);
}

}  // namespace overflow_fast
