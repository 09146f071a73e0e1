// Random tensors in heap blocks, and their stats by a scalar loop over the definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../../csrc/scan/half.h"
#include "../../csrc/scan/layout.h"
#include "../../csrc/scan/stat.h"

namespace overflow_fast {

inline std::mt19937_64 generator(20240229);

inline int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

// A heap block whose used part ends where the block ends.
struct Block {
  explicit Block(int64_t bytes) : bytes(bytes), memory(static_cast<char*>(std::malloc(bytes))) {}
  ~Block() { std::free(memory); }
  int64_t bytes;
  char* memory;
};

inline void fill(Block& block, bool keep_small) {
  // Small exponents in every format, so that most runs are clean.
  const uint64_t kept = keep_small ? 0x3f3f3f3f3f3f3f3f : ~uint64_t{0};
  for (int64_t i = 0; i < block.bytes; i += 8) {
    const uint64_t eight = generator() & kept;
    std::memcpy(block.memory + i, &eight, std::min<int64_t>(8, block.bytes - i));
  }
}

inline uint64_t read_bits(const char* from, int32_t bytes) {
  uint64_t bits = 0;
  std::memcpy(&bits, from, bytes);
  return bits;
}

inline uint64_t reference_key(const DtypeInfo& info, const char* element) {
  const uint64_t bits = read_bits(element, info.itemsize);
  const uint64_t sign = uint64_t{1} << (8 * info.key_bytes - 1);
  switch (info.kind) {
    case KeyKind::kSignMagnitude: return bits & (sign - 1);
    case KeyKind::kNegativeZeroNan: return bits == sign ? sign : bits & (sign - 1);
    case KeyKind::kTwosComplement: return bits & sign ? (~bits + 1) & (sign | (sign - 1)) : bits;
    case KeyKind::kBoolean: return bits != 0;
    default: return bits;
  }
}

// The key of |z|, of finite parts: rounded once, from double for the narrower formats.
inline uint64_t magnitude_key(const DtypeInfo& info, uint64_t re_key, uint64_t im_key) {
  const double re = decode_key(info, re_key), im = decode_key(info, im_key);
  uint64_t key = 0;
  if (info.key_bytes == 8) {
    const double wide = std::hypot(re, im);
    std::memcpy(&key, &wide, sizeof wide);
    return key;
  }
  const auto narrow = static_cast<float>(std::sqrt(re * re + im * im));
  std::memcpy(&key, &narrow, sizeof narrow);
  return info.key_bytes == 4 ? key : float_to_half_bits(static_cast<uint32_t>(key));
}

// nan where either part is, inf where either part is; an inf makes the magnitude inf.
inline void reference_complex(const DtypeInfo& info, const char* element, Slot& slot) {
  const uint64_t sign = uint64_t{1} << (8 * info.key_bytes - 1);
  Slot one{0, 0, 0, 0};
  uint64_t keys[2];
  bool has_nan = false, has_inf = false;
  for (int part = 0; part < 2; ++part) {
    const uint64_t bits = read_bits(element + part * info.key_bytes, info.key_bytes);
    keys[part] = bits & (sign - 1);
    has_nan |= keys[part] >= info.first_nan;
    if (keys[part] != info.inf_key) continue;
    has_inf = true;
    one.infs |= bits & sign ? Slot::kNegativeInf : Slot::kPositiveInf;
  }
  one.min_key = has_inf   ? info.inf_key
                : has_nan ? info.first_nan
                          : magnitude_key(info, keys[0], keys[1]);
  one.max_key = one.min_key;
  one.num_nan = has_nan;
  if (has_inf) one.infs |= Slot::kOneInf;
  combine(slot, one);
}

inline void reference_element(const DtypeInfo& info, const char* element, Slot& slot) {
  if (info.is_complex()) return reference_complex(info, element, slot);
  const uint64_t key = reference_key(info, element);
  Slot one{key, key, 0, 0};
  if (info.first_nan != kNoKey && key >= info.first_nan) {
    one.num_nan = 1;
  } else if (info.inf_key != kNoKey && key == info.inf_key) {
    const bool is_negative = read_bits(element, info.itemsize) >> (8 * info.itemsize - 1);
    one.infs = Slot::kOneInf | (is_negative ? Slot::kNegativeInf : Slot::kPositiveInf);
  }
  combine(slot, one);
}

inline void reference(const View& view, int64_t dim, const char* at, Slot& slot) {
  const DtypeInfo& info = dtype_info(view.dtype);
  if (dim == view.ndim) return reference_element(info, at, slot);
  const int64_t steps =
      view.strides[dim] == 0 ? std::min<int64_t>(view.sizes[dim], 1) : view.sizes[dim];
  for (int64_t i = 0; i < steps; ++i) {
    reference(view, dim + 1, at + i * view.strides[dim] * info.itemsize, slot);
  }
}

struct Shape {
  std::vector<int64_t> sizes, strides;
  int64_t span = 1;  // elements from the first to the last
};

// Dimensions in random order, with gaps, some of them expanded.
inline Shape draw_shape(int64_t max_numel) {
  Shape shape;
  int64_t stride = draw(0, 3) == 0 ? draw(1, 3) : 1;
  int64_t numel = 1;
  for (int64_t dim = draw(0, 4); dim > 0; --dim) {
    const int64_t largest = std::max<int64_t>(1, max_numel / numel);
    const int64_t size = draw(0, 1) ? draw(1, std::min<int64_t>(largest, 9)) : draw(1, largest);
    const bool is_expanded = draw(0, 7) == 0;
    const auto at = draw(0, static_cast<int64_t>(shape.sizes.size()));
    shape.sizes.insert(shape.sizes.begin() + at, size);
    shape.strides.insert(shape.strides.begin() + at, is_expanded ? 0 : stride);
    if (is_expanded) continue;
    shape.span += (size - 1) * stride;
    stride *= size;
    if (draw(0, 2) == 0) stride += draw(1, 5);
    numel *= size;
  }
  return shape;
}

inline bool same(const Slot& a, const Slot& b) { return std::memcmp(&a, &b, sizeof(Slot)) == 0; }

}  // namespace overflow_fast
