// The parameter of one launch of the scan kernel: tensors cut into units.
//
// A unit is a 16-byte vector where a tensor's memory allows it, else an element. Blocks read units
// in chunks, which are numbered through the whole list, so that one launch serves a list of any
// shapes. Slot i of the list belongs to item i.
#pragma once

#include <cstdint>

#include "../layout.h"
#include "../seen_kinds.h"
#include "../stat.h"

namespace overflow_fast::cuda {

// Defined elsewhere only to measure other values (benchmarks/bench_constants.py).
#if !defined(OF_CUDA_THREADS)
#define OF_CUDA_THREADS 256
#define OF_CUDA_UNROLL 4
#define OF_CUDA_BLOCKS 4
#define OF_CUDA_EVICT_FIRST 0
#endif

constexpr int kVectorBytes = 16;  // the widest load of a thread
// A chunk is one unrolled iteration of a block: 16 KiB of a dense tensor.
constexpr int kThreads = OF_CUDA_THREADS;
constexpr int kUnroll = OF_CUDA_UNROLL;
constexpr int kUnitsPerChunk = kThreads * kUnroll;
// As many as the kernel of runs may use registers for: 64 KiB of loads in flight on each
// multiprocessor. None of these three has been measured on a GPU yet.
constexpr int kBlocksPerMultiprocessor = OF_CUDA_BLOCKS;

enum class Unit : uint8_t {
  kVector,   // 16 aligned bytes
  kElement,  // an element at a multiple of its size
  kBytes,    // an element at any address
};

struct WorkItem {
  const char* data;      // the first unit
  int64_t num_units;     // a multi-dimensional item's units in its layout's order
  uint32_t first_chunk;  // of the list's chunks
  uint16_t first_dim;    // of the list's dims
  uint8_t num_dims;      // 0: the units follow each other
  Dtype dtype;
  Unit unit;
  uint8_t head;  // elements right before data, of a run that does not start at a vector
  uint8_t tail;  // elements right behind its last vector
};
static_assert(sizeof(WorkItem) == 32, "a thousand items fit the largest kernel parameter");

// True for an item that is not a run of vectors.
OF_HOST_DEVICE constexpr bool needs_generic_path(const WorkItem& item) {
  return item.unit != Unit::kVector || item.num_dims != 0;
}

// The division of a unit's number by a size takes two multiplications and a shift where all numbers
// of an item fit into 31 bits (Granlund and Montgomery, "Division by Invariant Integers using
// Multiplication", 1994); a division takes some twenty instructions, one of 64 bits a hundred.
constexpr int64_t kMaxNarrowUnits = 0x7fffffff;

// A dimension of an item: its size in units and its stride in bytes, innermost first. `magic` is
// the upper half of the size where an item has more than kMaxNarrowUnits.
struct UnitDim {
  int64_t stride;
  uint32_t size;
  uint32_t magic;

  static UnitDim of(int64_t size, int64_t stride, bool is_narrow) {
    UnitDim dim{stride, static_cast<uint32_t>(size), static_cast<uint32_t>(size >> 32)};
    if (!is_narrow) return dim;
    uint64_t power = 1;
    while (power < static_cast<uint64_t>(size)) power *= 2;
    const uint64_t rest = (power - static_cast<uint64_t>(size)) << 32;
    dim.magic = static_cast<uint32_t>(rest / static_cast<uint64_t>(size) + 1);
    return dim;
  }
  OF_HOST_DEVICE constexpr uint64_t wide_size() const { return uint64_t{magic} << 32 | size; }
};

// Kernel parameters end at 4 KiB, and from CUDA 12.1 on at 32,764 bytes; a launch copies its
// whole list, so a frame of a few tensors should not pay for a thousand.
template <int kItems, int kDims>
struct WorkList {
  static constexpr int kMaxItems = kItems;
  static constexpr int kMaxDims = kDims;

  Slot* slots;
  SeenKinds* seen;  // beside the slots, unless null; as the device sees them
  uint32_t seen_step;
  uint32_t num_items;
  uint32_t num_chunks;
  // How many chunks in a row a block reads before it leaves as many to each other block; 0: its
  // share of all of them.
  uint32_t turn;
  WorkItem items[kItems];
  UnitDim dims[kDims];
};
using SmallList = WorkList<4, 8>;
using MediumList = WorkList<88, 76>;  // the dims of any one tensor fit
using LargeList = WorkList<984, 76>;
static_assert(sizeof(MediumList) <= 4096 && MediumList::kMaxDims > Dims::kMax);
static_assert(sizeof(LargeList) <= 32764 && LargeList::kMaxDims > Dims::kMax);

// Fills an item from a view. `dims` has room for `room` dimensions, of which *num_dims are used.
// Returns false if they do not fit.
inline bool plan_item(const View& view, WorkItem& item, UnitDim* dims, int room, int* num_dims) {
  const DtypeInfo& info = dtype_info(view.dtype);
  const Layout layout(view);
  const int64_t itemsize = info.itemsize;
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  const bool is_vectorizable = !info.is_complex() && address % itemsize == 0;
  item = WorkItem{static_cast<const char*>(view.data),
                  layout.numel(),
                  0,
                  0,
                  0,
                  view.dtype,
                  address % itemsize == 0 ? Unit::kElement : Unit::kBytes,
                  0,
                  0};
  *num_dims = 0;
  if (layout.is_one_run()) {
    if (!is_vectorizable) return true;
    const int64_t to_vector = (kVectorBytes - address % kVectorBytes) % kVectorBytes / itemsize;
    const int64_t head = to_vector < layout.numel() ? to_vector : layout.numel();
    const int64_t per_vector = kVectorBytes / itemsize;
    item.data += head * itemsize;
    item.num_units = (layout.numel() - head) / per_vector;
    item.unit = Unit::kVector;
    item.head = static_cast<uint8_t>(head);
    item.tail = static_cast<uint8_t>((layout.numel() - head) % per_vector);
    return true;
  }
  const auto count = static_cast<int>(layout.dims().size());
  if (count > room) return false;
  bool has_vector_rows = is_vectorizable && address % kVectorBytes == 0 &&
                         layout.dims()[0].stride == 1 &&
                         layout.dims()[0].size * itemsize % kVectorBytes == 0;
  for (int i = 1; i < count; ++i) {
    has_vector_rows &= layout.dims()[i].stride * itemsize % kVectorBytes == 0;
  }
  if (has_vector_rows) {
    item.num_units = layout.numel() * itemsize / kVectorBytes;
    item.unit = Unit::kVector;
  }
  const bool is_narrow = item.num_units <= kMaxNarrowUnits;
  for (int i = 0; i < count; ++i) {
    const Dim& dim = layout.dims()[i];
    const bool is_vector = has_vector_rows && i == 0;
    dims[i] = is_vector ? UnitDim::of(dim.size * itemsize / kVectorBytes, kVectorBytes, is_narrow)
                        : UnitDim::of(dim.size, dim.stride * itemsize, is_narrow);
  }
  item.num_dims = static_cast<uint8_t>(count);
  *num_dims = count;
  return true;
}

inline uint32_t chunks_of(const WorkItem& item) {
  const int64_t chunks = (item.num_units + kUnitsPerChunk - 1) / kUnitsPerChunk;
  const bool has_ends_only = chunks == 0 && item.head + item.tail != 0;
  return static_cast<uint32_t>(has_ends_only ? 1 : chunks);
}

// Numbers the chunks of the items that `takes` chooses; the others count as empty.
template <class List, class F>
void number_chunks(List& list, F takes) {
  list.num_chunks = 0;
  for (uint32_t i = 0; i < list.num_items; ++i) {
    list.items[i].first_chunk = list.num_chunks;
    if (takes(list.items[i])) list.num_chunks += chunks_of(list.items[i]);
  }
}

// Fills `list` with the first of `count` views, as many as fit, and returns how many those are.
template <class List>
int64_t plan(const View* views, int64_t count, Slot* slots, const SeenStep& seen, List& list) {
  list.slots = slots;
  list.seen = seen.slots;
  list.seen_step = seen.number;
  list.num_items = 0;
  list.turn = 0;
  int used = 0;
  while (list.num_items < count && list.num_items < List::kMaxItems) {
    WorkItem& item = list.items[list.num_items];
    int num_dims = 0;
    if (!plan_item(views[list.num_items], item, list.dims + used, List::kMaxDims - used,
                   &num_dims)) {
      break;
    }
    item.first_dim = static_cast<uint16_t>(used);
    used += num_dims;
    ++list.num_items;
  }
  number_chunks(list, [](const WorkItem&) { return true; });
  return list.num_items;
}

}  // namespace overflow_fast::cuda
