// What accesses to memory must keep to: alignment, bounds, and an order among threads.
//
// 1. An access is a multiple of its size, as a GPU demands.
// 2. It lies within one allocation (a load may lie within a constant, a generic one within the
//    kernel's parameter). Allocations end with their last byte.
// 3. Shared memory: no thread writes what another has read or written since the last barrier of
//    the block, nor reads what another has written. An exchange within a warp is no order.
// 4. Global memory: what a thread has written by a plain store, no other reads or writes in the
//    launch unless a barrier of their block lies between. Of each four bytes the last store is
//    kept. Atomics and volatile stores are meant to meet; a load before another's store is seen in
//    another order of threads.
// 5. A fence for the whole system (membar.sys), behind which a thread tells the host that something
//    is there, does not lie in an epoch in which another thread of its block stores.
//
// Not seen: plain accesses that meet atomics, an order that fences alone make, races of launches on
// several streams, what memory and registers hold before they are written, and whatever ptxas and a
// GPU do otherwise than PTX says.
#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>

#include "machine.h"

namespace ptx {

Range running_parameter, last_hit;
bool is_written_plainly = false;

namespace {

constexpr uint64_t kAlignment = 256;  // of cudaMalloc

// By their ends, which lie behind their last bytes.
std::map<uint64_t, uint64_t>& allocations() {
  static std::map<uint64_t, uint64_t> by_end;
  return by_end;
}

bool is_allocated(uint64_t address, int bytes) {
  if (last_hit.has(address, bytes)) return true;
  const auto found = allocations().upper_bound(address);
  if (found == allocations().end()) return false;
  const Range range{found->second, found->first};
  if (!range.has(address, bytes)) return false;
  last_hit = range;
  return true;
}

bool is_constant(uint64_t address, int bytes) {
  for (const Constant* each = constants; each->data != nullptr; ++each) {
    const auto begin = reinterpret_cast<uint64_t>(each->data);
    if (Range{begin, begin + each->bytes}.has(address, bytes)) return true;
  }
  return false;
}

void check_shared(const Thread& thread, uint64_t address, int bytes, Kind kind, int line) {
  Accesses& all = accesses_of(thread);
  const uint64_t at = address - thread.shared;
  if (at + bytes > all.shared.size()) fail("an access outside of shared memory", line);
  for (uint64_t i = at; i < at + bytes; ++i) {
    Accesses::Byte& byte = all.shared[i];
    if (byte.write_epoch == all.epoch && byte.writer != thread.tid) {
      fail("a race on shared memory: another thread has written it since the barrier", line);
    }
    const bool is_read = byte.read_epoch == all.epoch;
    if (kind == Kind::kLoad) {
      byte.has_readers = is_read && (byte.has_readers || byte.reader != thread.tid);
      byte.read_epoch = all.epoch;
      byte.reader = thread.tid;
      continue;
    }
    if (is_read && (byte.has_readers || byte.reader != thread.tid)) {
      fail("a race on shared memory: another thread has read it since the barrier", line);
    }
    byte.write_epoch = all.epoch;
    byte.writer = thread.tid;
  }
}

// Who stored to four bytes of global memory, and when.
struct Written {
  uint32_t block, thread, epoch;
};
std::unordered_map<uint64_t, Written>& written() {
  static std::unordered_map<uint64_t, Written> by_place;
  return by_place;
}
constexpr uint64_t kPlaceBytes = 4;

void note_store(const Thread& thread, int line) {
  is_written_plainly = true;
  Accesses& all = accesses_of(thread);
  if (all.fence_epoch == all.epoch && all.fencer != thread.tid) {
    fail("a store that no barrier orders before the fence for the host", line);
  }
  const bool is_first = all.store_epoch != all.epoch;
  all.has_storers = !is_first && (all.has_storers || all.storer != thread.tid);
  all.store_epoch = all.epoch;
  all.storer = thread.tid;
}

void check_order(const Thread& thread, uint64_t address, int bytes, Kind kind, int line) {
  if (kind == Kind::kVolatile || kind == Kind::kAtomic) return;
  const uint32_t epoch = accesses_of(thread).epoch;
  const uint64_t end = (address + bytes + kPlaceBytes - 1) / kPlaceBytes;
  for (uint64_t place = address / kPlaceBytes; place < end; ++place) {
    const auto found = written().find(place);
    if (found != written().end()) {
      const Written& by = found->second;
      const bool is_ordered = by.block == thread.ctaid && by.epoch != epoch;
      if (!is_ordered && (by.block != thread.ctaid || by.thread != thread.tid)) {
        fail("a race on global memory: another thread has written it", line);
      }
    }
    if (kind == Kind::kStore) written()[place] = {thread.ctaid, thread.tid, epoch};
  }
  if (kind == Kind::kStore) note_store(thread, line);
}

}  // namespace

// Filled with what is a nan in most formats: a GPU leaves there what was.
void* allocate(uint64_t bytes) {
  const uint64_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, whole);
  std::memset(memory, 0x7f, whole);
  const auto begin = reinterpret_cast<uint64_t>(memory);
  allocations()[begin + bytes] = begin;
  return memory;
}

void release(void* memory) {
  const auto begin = reinterpret_cast<uint64_t>(memory);
  allocations().erase(allocations().upper_bound(begin));
  last_hit = {};
  std::free(memory);
}

void forget_writes() {
  written().clear();
  is_written_plainly = false;
}

void check(const Thread& thread, uint64_t address, int bytes, Space space, Kind kind, int line) {
  const bool is_load = kind == Kind::kLoad;
  if (address % bytes != 0) fail("a misaligned access", line);
  if (space == Space::kShared) return check_shared(thread, address, bytes, kind, line);
  if (is_allocated(address, bytes)) {
    if (is_load && !is_written_plainly) return;
    return check_order(thread, address, bytes, kind, line);
  }
  const bool is_parameter = space == Space::kGeneric && running_parameter.has(address, bytes);
  if (is_load && (is_parameter || is_constant(address, bytes))) return;
  fail(is_load ? "a load outside of all memory" : "a store outside of all memory", line);
}

void check_fence(const Thread& thread, int line) {
  Accesses& all = accesses_of(thread);
  if (all.store_epoch == all.epoch && (all.has_storers || all.storer != thread.tid)) {
    fail("a fence for the host, before which no barrier orders what others stored", line);
  }
  all.fence_epoch = all.epoch;
  all.fencer = thread.tid;
}

}  // namespace ptx
