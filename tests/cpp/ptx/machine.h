// The machine that runs translated PTX (translate.py): what a thread is, and what its instructions
// ask of memory.cpp and scheduler.cpp. A fault ends the program with status 3 and a line that has
// its kind, the line of the PTX, the thread and the kernel.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "instructions.h"

namespace ptx {

struct Block;

struct Thread {
  uint32_t tid, ctaid, ntid, nctaid;
  uint64_t shared;     // where the block's shared memory is
  uint64_t parameter;  // and the kernel's
  const int64_t* own;  // the kernel's numbers, see Kernel
  Block* block;
};

// Kernels whose instructions differ in numbers alone are one function, with numbers of their own.
struct Kernel {
  const char* name;
  int32_t parameter_bytes, shared_bytes, max_threads;
  void (*run)(Thread&);
  const int64_t* own;
};
struct Constant {
  const void* data;
  uint64_t bytes;
};
// What translate.py has written; they end with one of zeros.
extern const Kernel kernels[];
extern const Constant constants[];
extern const int architecture;

// ---- scheduler.cpp

// Runs a kernel's blocks on fibers, several blocks at once. Threads go on in an order that is drawn
// at each barrier.
void launch(const Kernel& kernel, uint32_t num_blocks, uint32_t num_threads, const void* parameter);

// A barrier of the block; true if `vote` is, of any thread.
bool barrier(Thread& thread, bool vote, int line);
// Values of the lanes of a warp, which all meet here. Not an order of their accesses to memory.
const uint64_t* exchange(Thread& thread, uint64_t value, int line);
[[noreturn]] void fail(const char* what, int line);

// ---- memory.cpp

// Bytes of global memory.
void* allocate(uint64_t bytes);
void release(void* memory);

// What memory.cpp needs to know of a block to see races.
struct Accesses {
  uint32_t epoch = 1;  // one more after each barrier
  struct Byte {        // of shared memory, the last that did it
    uint32_t write_epoch = 0, writer = 0, read_epoch = 0, reader = 0;
    bool has_readers = false;  // several
  };
  std::vector<Byte> shared;
  // Of plain stores to global memory, and of the fence that makes them visible to the host.
  uint32_t store_epoch = 0, storer = 0, fence_epoch = 0, fencer = 0;
  bool has_storers = false;
};
Accesses& accesses_of(const Thread& thread);
// A launch begins: what others have written is no race.
void forget_writes();

enum class Space { kGlobal, kShared, kGeneric };
// kVolatile is a store that others may see at any time, which is no race.
enum class Kind { kLoad, kStore, kVolatile, kAtomic };
void check(const Thread& thread, uint64_t address, int bytes, Space space, Kind kind, int line);

struct Range {
  uint64_t begin = 0, end = 0;
  bool has(uint64_t address, int bytes) const { return address >= begin && address + bytes <= end; }
};
extern Range running_parameter;  // the kernel's
extern Range last_hit;           // the allocation of the last access
extern bool is_written_plainly;  // a plain store of the launch has been seen

// As check() of a load, without a call for nearly all.
inline void check_load(const Thread& thread, uint64_t address, int bytes, Space space, int line) {
  if (address % bytes == 0) {
    if (space != Space::kShared && !is_written_plainly && last_hit.has(address, bytes)) return;
    if (space == Space::kGeneric && running_parameter.has(address, bytes)) return;
  }
  check(thread, address, bytes, space, Kind::kLoad, line);
}
void check_fence(const Thread& thread, int line);

// N values that one instruction loads or stores.
template <class T, int N>
struct Several {
  T at[N];
};

// Addresses in shared memory begin with 0.
template <class V, Space kSpace>
inline V load(const Thread& thread, uint64_t address, int line) {
  if (kSpace == Space::kShared) address += thread.shared;
  check_load(thread, address, sizeof(V), kSpace, line);
  return *reinterpret_cast<const V*>(address);
}
template <class V, Space kSpace, Kind kKind = Kind::kStore>
void store(const Thread& thread, uint64_t address, V value, int line) {
  if (kSpace == Space::kShared) address += thread.shared;
  check(thread, address, sizeof(V), kSpace, kKind, line);
  *reinterpret_cast<V*>(address) = value;
}
// Of memory that a function has as its parameters, or a kernel: the translation has checked it.
template <class V>
V load_parameter(uint64_t address) {
  return *reinterpret_cast<const V*>(address);
}
template <class V>
void store_parameter(uint64_t address, V value) {
  *reinterpret_cast<V*>(address) = value;
}

template <class T>
T& atomic(const Thread& thread, uint64_t address, int line) {
  check(thread, address, sizeof(T), Space::kGlobal, Kind::kAtomic, line);
  return *reinterpret_cast<T*>(address);
}
template <class T>
T atomic_add(const Thread& thread, uint64_t address, T value, int line) {
  T& old = atomic<T>(thread, address, line);
  return std::exchange(old, T(old + value));
}
template <class T>
T atomic_or(const Thread& thread, uint64_t address, T value, int line) {
  T& old = atomic<T>(thread, address, line);
  return std::exchange(old, T(old | value));
}
template <class T>
T atomic_min(const Thread& thread, uint64_t address, T value, int line) {
  T& old = atomic<T>(thread, address, line);
  return std::exchange(old, least(old, value));
}
template <class T>
T atomic_max(const Thread& thread, uint64_t address, T value, int line) {
  T& old = atomic<T>(thread, address, line);
  return std::exchange(old, most(old, value));
}

constexpr uint32_t kLanes = 32;

inline void require_all_lanes(uint32_t mask, int line) {
  if (mask != 0xffffffff) fail("an exchange of some lanes, which is not translated", line);
}
// shfl.sync.bfly, within the whole warp.
inline uint32_t from_lane_xor(Thread& thread, uint32_t value, uint32_t distance, uint32_t clamp,
                              uint32_t mask, int line) {
  require_all_lanes(mask, line);
  if (clamp != kLanes - 1) fail("a shuffle of parts of a warp, which is not translated", line);
  return static_cast<uint32_t>(exchange(thread, value, line)[(thread.tid % kLanes) ^ distance]);
}
// redux.sync
inline uint32_t least_of_lanes(Thread& thread, uint32_t value, uint32_t mask, int line) {
  require_all_lanes(mask, line);
  const uint64_t* lanes = exchange(thread, value, line);
  return static_cast<uint32_t>(*std::min_element(lanes, lanes + kLanes));
}
inline uint32_t most_of_lanes(Thread& thread, uint32_t value, uint32_t mask, int line) {
  require_all_lanes(mask, line);
  const uint64_t* lanes = exchange(thread, value, line);
  return static_cast<uint32_t>(*std::max_element(lanes, lanes + kLanes));
}

template <class T>
T quotient(T a, T b, int line) {
  if (b == 0) fail("a division by zero", line);
  return T(a / b);
}

}  // namespace ptx
