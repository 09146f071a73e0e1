// Values that a scan must not miss, as bits, and the places where a kernel changes its way.
#pragma once

#include <cstdint>
#include <vector>

#include "../../csrc/scan/cuda/work_list.h"
#include "../../csrc/scan/dtype.h"

namespace overflow_fast {

// Of one part of a complex element, else of the element: zeros, the smallest and the largest
// subnormal, the smallest normal, the largest number, infs, the first nan, all ones; each with and
// without a sign. Where a format has no such value, the pattern is another number of it.
inline std::vector<uint64_t> planted_bits(const DtypeInfo& info) {
  const uint64_t sign = uint64_t{1} << (8 * info.key_bytes - 1);
  const uint64_t mask = sign | (sign - 1);
  std::vector<uint64_t> keys = {0, 1, sign - 1};
  if (!info.is_integer()) {
    const uint64_t normal = uint64_t{1} << info.mantissa;
    keys.insert(keys.end(), {normal - 1, normal, info.first_nonfinite() - 1});
    keys.insert(keys.end(), {info.inf_key, info.first_nan});
  }
  std::vector<uint64_t> all;
  for (const uint64_t key : keys) {
    if (key == kNoKey) continue;
    all.push_back(key & mask);
    all.push_back((key | sign) & mask);
  }
  return all;
}

// How many elements planted tensors have: around a vector, and over two chunks and a tail.
inline std::vector<int64_t> planted_sizes(const DtypeInfo& info) {
  const int64_t vector = std::max(1, cuda::kVectorBytes / info.itemsize);
  const int64_t chunk = vector * cuda::kUnitsPerChunk;
  return {1, vector - 1, vector, vector + 1, 2 * chunk + 3 * vector + vector / 2 + 1};
}

// Elements at the edges of vectors, chunks and the tensor.
inline std::vector<int64_t> planted_positions(const DtypeInfo& info, int64_t numel) {
  const int64_t vector = std::max(1, cuda::kVectorBytes / info.itemsize);
  const int64_t chunk = vector * cuda::kUnitsPerChunk;
  std::vector<int64_t> places;
  for (const int64_t edge : {int64_t{0}, vector, numel / 2, chunk, 2 * chunk, numel}) {
    for (const int64_t place : {edge - 1, edge, edge + 1}) {
      if (place < 0 || place >= numel) continue;
      bool is_new = true;
      for (const int64_t other : places) is_new &= other != place;
      if (is_new) places.push_back(place);
    }
  }
  return places;
}

}  // namespace overflow_fast
