// The scan of a list of tensors in one dispatch, for Apple's GPUs: compiled at run time by
// torch.mps.compile_shader, and in the tests by g++ (tests/cpp/metal_emulation).
//
// A threadgroup reads one range of one tensor and combines what it found into the tensor's slot:
// four 64-bit words as in csrc/scan/stat.h, of which Metal can change 32 bits atomically. Minimum and
// maximum of keys of up to 32 bits are atomic in the lower halves. Tensors with keys of 64 bits
// are one threadgroup's each, so that nobody else writes their slot meanwhile. The host has reset
// the slots; a range that holds a non-finite value is read a second time, to count.
//
// Tensors are buffers of their own and not a list of addresses: torch tells Metal of bound buffers
// only, which it then keeps in memory and orders between dispatches.

#ifndef OF_SHARED
#define OF_SHARED threadgroup  // the declaration of a variable that threads share
#endif

// The visitors of a range's elements.
template <class U>
struct Extremes {
  U low;
  U high;

  void take(thread const Item& item, Bits<U> bits) {
    const U key = key_of<U>(item, bits);
    low = lesser(low, key);
    high = greater(high, key);
  }
};

template <class U>
struct Counts {
  uint num_nan;
  uint num_inf;
  uint signs;

  bool is_inf(thread const Item& item, U bits) {
    if (item.inf_key == ~ulong(0) || (bits & (sign_of<U>(item) - 1)) != item.inf_key) return false;
    signs |= (bits & sign_of<U>(item)) != 0 ? 2 : 1;
    return true;
  }
  void take(thread const Item& item, Bits<U> bits) {
    const U finite = sign_of<U>(item) - 1;
    const bool is_complex = item.kind == kComplexMagnitude;
    const U key = is_complex ? greater(bits.re & finite, bits.im & finite)
                             : real_key<U>(item, bits.re);
    if (item.first_nan != ~ulong(0) && key >= item.first_nan) ++num_nan;
    const bool re_is_inf = is_inf(item, bits.re);
    const bool im_is_inf = is_complex && is_inf(item, bits.im);
    if (re_is_inf || im_is_inf) ++num_inf;
  }
};

// Where an element of a strided tensor lies: dimensions innermost first.
inline device const uchar* element_at(thread const Item& item, constant long* work,
                                      device const uchar* data, long index) {
  if (item.num_dims == 0) return data + index * long(item.itemsize);
  constant long* dims = work + item.first_dim;
  for (uint i = 0; i + 1 < item.num_dims; ++i) {
    data += index % dims[2 * i] * dims[2 * i + 1];
    index /= dims[2 * i];
  }
  return data + index * dims[2 * item.num_dims - 1];
}

// This thread's share of the words [begin, end) of a run, and of what lies around the run's words.
template <class U, class Visitor>
inline void visit_words(thread const Item& item, device const uchar* data, long begin, long end,
                        uint thread_id, thread Visitor& visitor) {
  const uint bytes = item.itemsize;
  device const uint* words = (device const uint*)(data + item.head * bytes);
  for (long i = begin + thread_id; i < end; i += kThreads) {
    const uint word = words[i];
    for (uint j = 0; j < 4; j += bytes) {
      Bits<U> bits;
      bits.re = bytes == 4 ? word : word >> (8 * j) & ((1u << (8 * bytes)) - 1);
      bits.im = 0;
      visitor.take(item, bits);
    }
  }
  if (begin != 0 || thread_id >= item.head + item.tail) return;
  const long skipped = thread_id < item.head ? 0 : 4 * item.num_units;
  visitor.take(item, load_element<U>(item, data + skipped + long(thread_id * bytes)));
}

// This thread's share of the units [begin, end).
template <class U, class Visitor>
inline void visit_units(thread const Item& item, constant long* work, device const uchar* data,
                        long begin, long end, uint thread_id, thread Visitor& visitor) {
  if (item.is_words != 0) {
    return visit_words<U, Visitor>(item, data, begin, end, thread_id, visitor);
  }
  for (long i = begin + thread_id; i < end; i += kThreads) {
    visitor.take(item, load_element<U>(item, element_at(item, work, data, i)));
  }
}

inline void add(device atomic_uint* words, uint amount) {
  const uint before = atomic_fetch_add_explicit(words, amount, memory_order_relaxed);
  if (before + amount < before) atomic_fetch_add_explicit(words + 1, 1u, memory_order_relaxed);
}

template <class U>
inline void flush(thread const Counts<U>& counts, device atomic_uint* slot) {
  if (counts.num_nan != 0) add(slot + 4, counts.num_nan);
  if (counts.num_inf == 0) return;
  add(slot + 6, 4 * counts.num_inf);  // a multiple of four leaves the sign bits alone
  atomic_fetch_or_explicit(slot + 6, counts.signs, memory_order_relaxed);
}

inline ulong load_word(device atomic_uint* word) {
  const ulong upper = atomic_load_explicit(word + 1, memory_order_relaxed);
  return upper << 32 | atomic_load_explicit(word, memory_order_relaxed);
}

inline void store_word(device atomic_uint* word, ulong value) {
  atomic_store_explicit(word, uint(value), memory_order_relaxed);
  atomic_store_explicit(word + 1, uint(value >> 32), memory_order_relaxed);
}

// Combines a block's extremes into a slot; see the top for who else may write there.
inline void flush(thread const Item& item, device atomic_uint* slot, ulong low, ulong high) {
  if (item.key_bytes > 4) {
    store_word(slot, lesser(load_word(slot), low));
    store_word(slot + 2, greater(load_word(slot + 2), high));
    return;
  }
  atomic_store_explicit(slot + 1, 0u, memory_order_relaxed);
  atomic_fetch_min_explicit(slot, uint(low), memory_order_relaxed);
  atomic_fetch_max_explicit(slot + 2, uint(high), memory_order_relaxed);
}

template <class U>
inline void scan_range(thread const Item& item, constant long* work, device const uchar* data,
                       device atomic_uint* slot, threadgroup ulong* lows,
                       threadgroup ulong* highs, uint block, uint thread_id) {
  const long begin = long(block - item.first_block) * item.units_per_block;
  const long end = lesser(begin + item.units_per_block, item.num_units);
  Extremes<U> extremes;
  extremes.low = ~U(0);
  extremes.high = 0;
  visit_units<U, Extremes<U>>(item, work, data, begin, end, thread_id, extremes);
  // What a thread without elements has is neutral among the others.
  lows[thread_id] = extremes.low;
  highs[thread_id] = extremes.high;
  for (uint half_way = kThreads / 2; half_way > 0; half_way /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_id < half_way) {
      lows[thread_id] = lesser(lows[thread_id], lows[thread_id + half_way]);
      highs[thread_id] = greater(highs[thread_id], highs[thread_id + half_way]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_id == 0) flush(item, slot, lows[0], highs[0]);
  if (highs[0] < lesser(item.inf_key, item.first_nan)) return;
  Counts<U> counts;
  counts.num_nan = counts.num_inf = counts.signs = 0;
  visit_units<U, Counts<U>>(item, work, data, begin, end, thread_id, counts);
  flush(counts, slot);
}

#define OF_SCAN(data)                                                                          \
  OF_SHARED ulong lows[kThreads];                                                              \
  OF_SHARED ulong highs[kThreads];                                                             \
  const Item item = item_of(work, index);                                                      \
  if (item.key_bytes <= 4) {                                                                   \
    scan_range<uint>(item, work, data, slots + 8 * index, lows, highs, block, thread_id);      \
  } else {                                                                                     \
    scan_range<ulong>(item, work, data, slots + 8 * index, lows, highs, block, thread_id);     \
  }

#define OF_TENSOR(i, place) device const uchar *t##i [[buffer(place)]]
#define OF_CASE(i) \
  case i: data = t##i; break;

// For lists of up to 4 tensors, most of them; further parameters repeat a tensor.
kernel void scan_4(device atomic_uint* slots [[buffer(0)]], constant long* work [[buffer(1)]],
                   OF_TENSOR(0, 2), OF_TENSOR(1, 3), OF_TENSOR(2, 4), OF_TENSOR(3, 5),
                   uint block [[threadgroup_position_in_grid]],
                   uint thread_id [[thread_index_in_threadgroup]]) {
  const uint index = index_of(work, block);
  device const uchar* data = t0;
  switch (index) { OF_CASE(1) OF_CASE(2) OF_CASE(3) }
  OF_SCAN(data)
}

// A kernel has 31 buffers at most.
kernel void scan_24(device atomic_uint* slots [[buffer(0)]], constant long* work [[buffer(1)]],
                    OF_TENSOR(0, 2), OF_TENSOR(1, 3), OF_TENSOR(2, 4), OF_TENSOR(3, 5), OF_TENSOR(4, 6),
                    OF_TENSOR(5, 7), OF_TENSOR(6, 8), OF_TENSOR(7, 9), OF_TENSOR(8, 10), OF_TENSOR(9, 11),
                    OF_TENSOR(10, 12), OF_TENSOR(11, 13), OF_TENSOR(12, 14), OF_TENSOR(13, 15), OF_TENSOR(14, 16),
                    OF_TENSOR(15, 17), OF_TENSOR(16, 18), OF_TENSOR(17, 19), OF_TENSOR(18, 20), OF_TENSOR(19, 21),
                    OF_TENSOR(20, 22), OF_TENSOR(21, 23), OF_TENSOR(22, 24), OF_TENSOR(23, 25),
                    uint block [[threadgroup_position_in_grid]],
                    uint thread_id [[thread_index_in_threadgroup]]) {
  const uint index = index_of(work, block);
  device const uchar* data = t0;
  switch (index) {
    OF_CASE(1) OF_CASE(2) OF_CASE(3) OF_CASE(4) OF_CASE(5) OF_CASE(6) OF_CASE(7) OF_CASE(8)
    OF_CASE(9) OF_CASE(10) OF_CASE(11) OF_CASE(12) OF_CASE(13) OF_CASE(14) OF_CASE(15)
    OF_CASE(16) OF_CASE(17) OF_CASE(18) OF_CASE(19) OF_CASE(20) OF_CASE(21) OF_CASE(22)
    OF_CASE(23)
  }
  OF_SCAN(data)
}
