// The extremes of a range of an item's units, each thread's share of them.
#pragma once

#include <cuda_runtime.h>

#include "keys.cuh"
#include "work_list.h"

namespace overflow_fast::cuda {

// The scan reads a vector once, but the tensor's next reader wants it in L2: bypasses L1 only.
// OF_CUDA_EVICT_FIRST lets L2 drop it first; it is there to be measured.
__device__ inline uint4 load_vector(const char* from) {
#if defined(__CUDA_ARCH__) && OF_CUDA_EVICT_FIRST
  uint4 v;
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "l"(policy));
  return v;
#elif defined(__CUDA_ARCH__)
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
#else
  return *reinterpret_cast<const uint4*>(from);
#endif
}

// The offset of a unit in bytes: see UnitDim. Not inlined: the loop would be repeated in the code a
// hundred times. The arguments are passed in registers.
__device__ __noinline__ inline int64_t offset_of(const UnitDim* dims, int num_dims, bool is_narrow,
                                                 uint64_t unit) {
  int64_t offset = 0;
  if (is_narrow) {
    auto rest = static_cast<uint32_t>(unit);
    for (int i = 0; i + 1 < num_dims; ++i) {
      const int shift = 32 - __clz(static_cast<int>(dims[i].size - 1));
      const uint32_t next = (__umulhi(rest, dims[i].magic) + rest) >> shift;
      offset += static_cast<int64_t>(rest - next * dims[i].size) * dims[i].stride;
      rest = next;
    }
    unit = rest;
  } else {
    for (int i = 0; i + 1 < num_dims; ++i) {
      const uint64_t size = dims[i].wide_size();
      const uint64_t next = unit / size;
      offset += static_cast<int64_t>(unit - next * size) * dims[i].stride;
      unit = next;
    }
  }
  return offset + static_cast<int64_t>(unit) * dims[num_dims - 1].stride;
}

// The addresses of an item's units.
struct Walk {
  const char* data;
  const UnitDim* dims;  // of the item's list
  int64_t unit_bytes;
  int num_dims;
  bool is_narrow;

  __device__ Walk(const WorkItem& item, const UnitDim* list_dims, int32_t itemsize)
      : data(item.data),
        dims(list_dims + item.first_dim),
        unit_bytes(item.unit == Unit::kVector ? kVectorBytes : itemsize),
        num_dims(item.num_dims),
        is_narrow(item.num_units <= kMaxNarrowUnits) {}

  __device__ const char* at(int64_t unit) const {
    if (num_dims == 0) return data + unit * unit_bytes;
    return data + offset_of(dims, num_dims, is_narrow, static_cast<uint64_t>(unit));
  }
};

// Scans vectors that follow each other, as most tensors do. Threads past the end read the last one
// again, which changes no extreme and delays no lane.
template <class Keys>
__device__ Extremes scan_run(const char* data, int64_t begin, int64_t end) {
  Keys keys;
  int64_t i = begin + threadIdx.x;
  for (; i + (kUnroll - 1) * kThreads < end; i += kUnitsPerChunk) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      v[u] = load_vector(data + (i + u * kThreads) * kVectorBytes);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) take_vector(keys, v[u]);
  }
  if (i < end) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t unit = i + u * kThreads;
      v[u] = load_vector(data + (unit < end ? unit : end - 1) * kVectorBytes);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) take_vector(keys, v[u]);
  }
  return keys.extremes();
}

// The extremes of vectors at any addresses. The addresses cost more than the keys, so they are
// computed in one place for all kinds of keys.
template <class Keys>
__device__ Extremes extremes_of(const uint4 (&v)[kUnroll]) {
  Keys keys;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) take_vector(keys, v[u]);
  return keys.extremes();
}

// Calls visit.operator()<Keys>() with the keys of a real format.
template <KeyKind kKind, class Visit>
__device__ Extremes with_keys_of(int32_t bytes, const Visit& visit) {
  switch (bytes) {
    case 1: return visit.template operator()<VectorKeys<1, kKind>>();
    case 2: return visit.template operator()<VectorKeys<2, kKind>>();
    case 4: return visit.template operator()<VectorKeys<4, kKind>>();
    default: return visit.template operator()<VectorKeys<8, kKind>>();
  }
}

template <class Visit>
__device__ Extremes with_keys(const Format& format, const Visit& visit) {
  switch (format.kind) {
    case KeyKind::kSignMagnitude:
      return with_keys_of<KeyKind::kSignMagnitude>(format.key_bytes, visit);
    case KeyKind::kTwosComplement:
      return with_keys_of<KeyKind::kTwosComplement>(format.key_bytes, visit);
    case KeyKind::kNegativeZeroNan:
      return visit.template operator()<VectorKeys<1, KeyKind::kNegativeZeroNan>>();
    default: return with_keys_of<KeyKind::kUnsigned>(format.key_bytes, visit);
  }
}

__device__ inline Extremes scan_vectors(const Format& format, const Walk& walk, int64_t begin,
                                        int64_t end) {
  Extremes keys;
  for (int64_t i = begin + threadIdx.x; i < end; i += kUnitsPerChunk) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t unit = i + u * kThreads;
      v[u] = load_vector(walk.at(unit < end ? unit : end - 1));
    }
    const Extremes some = with_keys(format, [&]<class Keys>() { return extremes_of<Keys>(v); });
    keys.take(some.low);
    keys.take(some.high);
  }
  return keys;
}

// Elements of kParts words of type U each, wherever they lie: more of small ones at once, of which
// fewer bytes are in flight.
template <class U, int kParts>
__device__ Extremes scan_elements(const Format& format, const Walk& walk, int64_t begin,
                                  int64_t end) {
  constexpr int kLoads = sizeof(U) * kParts <= 4 ? 2 * kUnroll : kUnroll;
  Extremes keys;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads * kLoads) {
    U parts[kLoads][kParts];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int64_t unit = i + u * kThreads;
      const auto* from = reinterpret_cast<const U*>(walk.at(unit < end ? unit : end - 1));
      for (int part = 0; part < kParts; ++part) parts[u][part] = from[part];
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      keys.take(key_of(format, {parts[u][0], parts[u][kParts - 1]}));
    }
  }
  return keys;
}

__device__ inline Extremes scan_bytes(const Format& format, const Walk& walk, int64_t begin,
                                      int64_t end) {
  Extremes keys;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    keys.take(key_of(format, load_element(format, walk.at(i), false)));
  }
  return keys;
}

__device__ inline Extremes scan_generic_units(const WorkItem& item, const UnitDim* dims,
                                              const Format& format, int64_t begin, int64_t end) {
  const Walk walk(item, dims, format.itemsize);
  if (item.unit == Unit::kVector) return scan_vectors(format, walk, begin, end);
  if (item.unit == Unit::kBytes) return scan_bytes(format, walk, begin, end);
  if (format.kind == KeyKind::kComplexMagnitude) {
    if (format.key_bytes == 2) return scan_elements<uint16_t, 2>(format, walk, begin, end);
    if (format.key_bytes == 4) return scan_elements<uint32_t, 2>(format, walk, begin, end);
    return scan_elements<uint64_t, 2>(format, walk, begin, end);
  }
  if (format.key_bytes == 1) return scan_elements<uint8_t, 1>(format, walk, begin, end);
  if (format.key_bytes == 2) return scan_elements<uint16_t, 1>(format, walk, begin, end);
  if (format.key_bytes == 4) return scan_elements<uint32_t, 1>(format, walk, begin, end);
  return scan_elements<uint64_t, 1>(format, walk, begin, end);
}

template <bool kIsGeneric>
__device__ Extremes scan_units(const WorkItem& item, const UnitDim* dims, const Format& format,
                               int64_t begin, int64_t end) {
  if constexpr (kIsGeneric) {
    if (needs_generic_path(item)) return scan_generic_units(item, dims, format, begin, end);
  }
  const char* data = item.data;
  return with_keys(format, [&]<class Keys>() { return scan_run<Keys>(data, begin, end); });
}

// The elements around a run's vectors, of which there are fewer than threads.
__device__ inline const char* end_element(const WorkItem& item, const Format& format) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < item.head) return item.data - (lane + 1) * format.itemsize;
  if (lane >= item.head + item.tail) return nullptr;
  return item.data + item.num_units * kVectorBytes + (lane - item.head) * format.itemsize;
}

}  // namespace overflow_fast::cuda
