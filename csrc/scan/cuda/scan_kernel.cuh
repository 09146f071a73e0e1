// The scan of a list of tensors in one launch: each block reads contiguous ranges of the list's
// chunks, one or several, and combines what it found into the slots of the items it met, by atomics.
//
// The caller has reset the slots; several launches may add to them. Blocks update a slot in any
// order, which changes no minimum, maximum or sum. A block reads a range that holds a non-finite
// value a second time, to count; all other ranges are read once.
//
// The kernel is compiled twice: for lists whose every item is a run of 16-byte vectors of a real
// dtype, as nearly all are, and with the registers that rows, single elements and complex
// magnitudes need (kIsGeneric).
#pragma once

#include "scan_kernel.h"
#include "scan_units.cuh"

namespace overflow_fast::cuda {

constexpr int kWarps = kThreads / kLanes;

__device__ inline Extremes reduced_in_warp(Extremes keys, bool is_narrow) {
#if !defined(__HIP_PLATFORM_AMD__) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800)
  if (is_narrow) {
    return {__reduce_min_sync(kAllLanes, static_cast<uint32_t>(keys.low)),
            __reduce_max_sync(kAllLanes, static_cast<uint32_t>(keys.high))};
  }
#endif
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const Extremes other = {from_lane_xor(keys.low, distance), from_lane_xor(keys.high, distance)};
    keys.low = other.low < keys.low ? other.low : keys.low;
    keys.high = other.high > keys.high ? other.high : keys.high;
  }
  return keys;
}

// One atomic pair per block and item. Returns whether the block met a non-finite value.
__device__ inline bool flush(const Format& format, const Extremes& keys, Extremes* of_warps,
                             Slot* slot) {
  const Extremes in_warp = reduced_in_warp(keys, format.key_bytes <= 4);
  if (threadIdx.x % kLanes == 0) of_warps[threadIdx.x / kLanes] = in_warp;
  const bool is_nonfinite = keys.high >= format.first_nonfinite();
  const bool any_nonfinite = __syncthreads_or(is_nonfinite);
  if (threadIdx.x == 0) {
    Extremes all = of_warps[0];
    for (int i = 1; i < kWarps; ++i) {
      all.low = of_warps[i].low < all.low ? of_warps[i].low : all.low;
      all.high = of_warps[i].high > all.high ? of_warps[i].high : all.high;
    }
    all = finished(format, all);
    atomicMin(reinterpret_cast<unsigned long long*>(&slot->min_key), all.low);
    atomicMax(reinterpret_cast<unsigned long long*>(&slot->max_key), all.high);
  }
  __syncthreads();  // of_warps is free for the next item
  return any_nonfinite;
}

// Writes to the host's memory what a slot had not met before.
__device__ inline void note_seen(SeenKinds* seen, uint32_t step, uint64_t new_kinds) {
  if (new_kinds & Slot::kNan) static_cast<volatile SeenKinds*>(seen)->nan = step;
  if (new_kinds & Slot::kPositiveInf) static_cast<volatile SeenKinds*>(seen)->positive_inf = step;
  if (new_kinds & Slot::kNegativeInf) static_cast<volatile SeenKinds*>(seen)->negative_inf = step;
}

// Runs for bad tensors, and in each step for those with intended infs, such as masks.
template <bool kIsGeneric>
__device__ void count_nonfinite(const WorkItem& item, const UnitDim* dims, int64_t begin,
                                int64_t end, bool takes_ends, Slot* slot, SeenKinds* seen,
                                uint32_t seen_step) {
  const Format format = format_of<kIsGeneric>(item.dtype);
  const Walk walk(item, dims, format.itemsize);
  Counts counts;
  const bool is_aligned = item.unit != Unit::kBytes;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const char* unit = kIsGeneric ? walk.at(i) : item.data + i * kVectorBytes;
    if (item.unit != Unit::kVector) {
      counts.take(format, load_element(format, unit, is_aligned));
      continue;
    }
    const uint4 v = load_vector(unit);
    for (int32_t j = 0; j < kVectorBytes / format.itemsize; ++j) {
      counts.take(format, {bits_in_vector(v, j, format.itemsize), 0});
    }
  }
  const char* element = takes_ends ? end_element(item, format) : nullptr;
  if (element != nullptr) counts.take(format, load_element(format, element, is_aligned));
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    counts.num_nan += from_lane_xor(counts.num_nan, distance);
    counts.infs = combine_infs(counts.infs, from_lane_xor(counts.infs, distance));
  }
  if (threadIdx.x % kLanes != 0) return;
  auto* infs = reinterpret_cast<unsigned long long*>(&slot->infs);
  const auto nans_before =
      atomicAdd(reinterpret_cast<unsigned long long*>(&slot->num_nan), counts.num_nan);
  atomicAdd(infs, counts.infs & ~3ull);  // a multiple of four leaves the sign bits alone
  const auto infs_before = atomicOr(infs, counts.infs & 3ull);
  if (seen == nullptr) return;
  const bool is_first_nan = nans_before == 0 && counts.num_nan != 0;
  note_seen(seen, seen_step, (is_first_nan ? Slot::kNan : 0) | (counts.infs & 3 & ~infs_before));
}

// The last item whose chunks begin at `chunk` or before.
template <class List>
__device__ uint32_t item_of(const List& list, uint32_t chunk) {
  uint32_t low = 0;
  for (uint32_t high = list.num_items; low + 1 < high;) {
    const uint32_t middle = (low + high) / 2;
    if (list.items[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Scans the chunks from `chunk` on, before `end_chunk`.
template <class List, bool kIsGeneric>
__device__ void scan_chunks(const List& list, uint32_t chunk, uint32_t end_chunk,
                            Extremes* of_warps) {
  for (uint32_t i = item_of(list, chunk); chunk < end_chunk; ++i) {
    const WorkItem& item = list.items[i];
    const uint32_t next_item =
        i + 1 < list.num_items ? list.items[i + 1].first_chunk : list.num_chunks;
    const uint32_t stop = next_item < end_chunk ? next_item : end_chunk;
    if (stop == chunk) continue;  // an empty tensor
    const Format format = format_of<kIsGeneric>(item.dtype);
    const int64_t begin = int64_t{kUnitsPerChunk} * (chunk - item.first_chunk);
    const int64_t limit = int64_t{kUnitsPerChunk} * (stop - item.first_chunk);
    const int64_t end = limit < item.num_units ? limit : item.num_units;
    const bool takes_ends = chunk == item.first_chunk;

    Extremes keys = scan_units<kIsGeneric>(item, list.dims, format, begin, end);
    const char* element = takes_ends ? end_element(item, format) : nullptr;
    if (element != nullptr) keys.take(key_of(format, load_element(format, element, true)));
    if (flush(format, keys, of_warps, list.slots + i)) {
      count_nonfinite<kIsGeneric>(item, list.dims, begin, end, takes_ends, list.slots + i,
                                  list.seen == nullptr ? nullptr : list.seen + i, list.seen_step);
    }
    chunk = stop;
  }
}

// A grid of at most num_chunks blocks, each of kThreads threads.
template <class List, bool kIsGeneric>
__global__ void __launch_bounds__(kThreads, kIsGeneric ? 2 : kBlocksPerMultiprocessor)
    scan_kernel(const __grid_constant__ List parameter) {
  const List& list = parameter_of(parameter);
  __shared__ unsigned long long shared[2 * kWarps];
  auto* of_warps = reinterpret_cast<Extremes*>(shared);
  // Its share of all chunks, or a turn and all that follow it by as much as all blocks read. One
  // loop for both: the scan is compiled into it.
  const uint64_t all = list.num_chunks;
  uint64_t chunk = uint64_t{list.turn} * blockIdx.x;
  uint64_t length = list.turn;
  uint64_t round = uint64_t{list.turn} * gridDim.x;
  if (list.turn == 0) {
    chunk = all * blockIdx.x / gridDim.x;
    length = all * (blockIdx.x + 1) / gridDim.x - chunk;
    round = all;
  }
  for (; chunk < all; chunk += round) {
    const uint64_t end = chunk + length;
    scan_chunks<List, kIsGeneric>(list, static_cast<uint32_t>(chunk),
                                  static_cast<uint32_t>(end < all ? end : all), of_warps);
  }
}

}  // namespace overflow_fast::cuda
