// The scan of a list of tensors in one dispatch, for Apple's GPUs: compiled at run time by
// torch.mps.compile_shader, and in the tests by g++ (tests/cpp/metal_emulation).
//
// A threadgroup reads one range of one tensor and combines what it found into the tensor's slot:
// four 64-bit words as in csrc/stat.h, of which Metal can change 32 bits atomically. Minimum and
// maximum of keys of up to 32 bits are atomic in the lower halves. Tensors with keys of 64 bits
// are one threadgroup's each, so that nobody else writes their slot meanwhile. The host has reset
// the slots; a range that holds a non-finite value is read a second time, to count.
//
// Tensors are buffers of their own and not a list of addresses: torch tells Metal of bound buffers
// only, which it then keeps in memory and orders between dispatches.
#include <metal_stdlib>
using namespace metal;

#ifndef OF_SHARED
#define OF_SHARED threadgroup  // the declaration of a variable that threads share
#endif

#ifndef OF_THREADS
#define OF_THREADS 256  // of a threadgroup, as csrc/mps/work_list.h has them
#endif

constant constexpr uint kThreads = OF_THREADS;
constant constexpr uint kItemWords = 8;

// As in csrc/dtype.h.
constant constexpr uint kSignMagnitude = 0;
constant constexpr uint kNegativeZeroNan = 1;
constant constexpr uint kTwosComplement = 3;
constant constexpr uint kBoolean = 4;
constant constexpr uint kComplexMagnitude = 5;

struct Item {
  long num_units;
  uint first_block;
  long units_per_block;
  uint kind;
  uint itemsize;
  uint key_bytes;
  uint num_dims;
  uint is_words;  // units are 32-bit words of a run, not elements
  uint head;      // elements in front of the first word
  uint tail;      // elements behind the last one
  ulong inf_key;
  ulong first_nan;
  long first_dim;  // where its pairs (size, stride in bytes) begin in the work list
};

inline Item item_of(constant long* work, uint index) {
  constant long* from = work + 1 + index * kItemWords;
  const ulong packed = ulong(from[3]);
  Item item;
  item.num_units = from[0];
  item.first_block = uint(from[1]);
  item.units_per_block = from[2];
  item.kind = uint(packed & 0xff);
  item.itemsize = uint(packed >> 8 & 0xff);
  item.key_bytes = uint(packed >> 16 & 0xff);
  item.num_dims = uint(packed >> 24 & 0xff);
  item.is_words = uint(packed >> 32 & 0xff);
  item.head = uint(packed >> 40 & 0xff);
  item.tail = uint(packed >> 48 & 0xff);
  item.inf_key = ulong(from[4]);
  item.first_nan = ulong(from[5]);
  item.first_dim = from[6];
  return item;
}

// The last item whose blocks begin at `block` or before.
inline uint index_of(constant long* work, uint block) {
  uint index = 0;
  while (index + 1 < uint(work[0]) && uint(work[1 + (index + 1) * kItemWords + 1]) <= block) ++index;
  return index;
}

// The library's functions are used with 32 bits only.
template <class U>
inline U lesser(U a, U b) {
  return a < b ? a : b;
}
template <class U>
inline U greater(U a, U b) {
  return a < b ? b : a;
}
inline int num_bits(ulong x) {
  const uint upper = uint(x >> 32);
  return upper != 0 ? 64 - int(clz(upper)) : 32 - int(clz(uint(x)));
}

// binary16 to binary32 and back as in csrc/half.h, for finite magnitudes.
inline uint half_to_float_key(uint half_key) {
  if (half_key >= 0x400) return (half_key << 13) + (112u << 23);
  if (half_key == 0) return 0;
  const uint shift = clz(half_key) - 21;  // brings the leading bit to bit 10
  return ((113 - shift) << 23) + ((half_key << shift & 0x3ff) << 13);
}

inline uint float_to_half_key(uint key) {
  if (key >= 0x477ff000) return 0x7c00;  // rounds to inf
  if (key < 0x33000000) return 0;
  const bool is_normal = key >= 0x38800000;
  const uint significand = (key & 0x7fffff) | 0x800000;
  const uint drop = is_normal ? 13 : 126 - (key >> 23);
  const uint kept = is_normal ? (key - (112u << 23)) >> 13 : significand >> drop;
  const uint rest = significand & ((1u << drop) - 1), middle = 1u << (drop - 1);
  return kept + (rest > middle || (rest == middle && (kept & 1) != 0) ? 1 : 0);
}

// sqrt(a * a + b * b) of finite binary32 magnitudes, as the other kernels compute it in binary64
// and round it to binary32, by integers: Metal has no binary64.
inline uint float_magnitude(uint x, uint y) {
  const uint a = greater(x, y), b = lesser(x, y);
  if (b == 0) return a;
  const uint a_field = greater(a >> 23, 1u), b_field = greater(b >> 23, 1u);
  const ulong a_part = a >> 23 == 0 ? a : (a & 0x7fffff) | 0x800000;
  const ulong b_part = b >> 23 == 0 ? b : (b & 0x7fffff) | 0x800000;
  // The sum of the squares is `sum` * 2^exponent, and more by less than that if is_inexact.
  const uint distance = 2 * (a_field - b_field);
  const uint shift = lesser(distance, 14u), rest = distance - shift;
  const ulong b_square = b_part * b_part;
  ulong sum = (a_part * a_part << shift) + (rest < 64 ? b_square >> rest : 0);
  const bool is_inexact = rest >= 64 || (b_square & ((ulong(1) << rest) - 1)) != 0;
  int exponent = 2 * (int(a_field) - 150) - int(shift);
  // Rounded to 53 bits, to even.
  const int drop = num_bits(sum) - 53;
  if (drop > 0) {
    const ulong low = sum & ((ulong(1) << drop) - 1), middle = ulong(1) << (drop - 1);
    sum >>= drop;
    sum += low > middle || (low == middle && (is_inexact || (sum & 1) != 0)) ? 1 : 0;
    exponent += drop;
  }
  if (exponent & 1) {
    sum <<= 1;
    --exponent;
  }
  // The root is `root` * 2^unit, and more by less than that; `root` has 24 bits or is subnormal.
  const int root_bits = (num_bits(sum) + 1) / 2;
  const int unit = greater(exponent / 2 + root_bits - 24, -149);
  const uint cut = 2 * uint(unit - exponent / 2);
  const ulong square = sum >> cut;
  ulong root = ulong(sqrt(float(square)));
  while (root * root > square) --root;
  while ((root + 1) * (root + 1) <= square) ++root;
  // The root of the sum, rounded to 53 bits, against the middle between `root` and its successor:
  // it counts as the middle if it is nearer to that than half a unit of the 53rd bit.
  const ulong middle = (2 * root + 1) << (cut / 2);
  const long above = long(4 * sum) - long(middle * middle);
  const int scale = 53 - num_bits(middle);
  const bool is_above = above > 0 && (ulong(above) << scale) > middle;
  const bool is_below = above < 0 && (ulong(-above) << scale) >= middle;
  if (is_above || (!is_below && (root & 1) != 0)) ++root;
  return lesser(uint(root) + (uint(unit + 149) << 23), 0x7f800000u);
}

// An element's bits, of a type that holds its key; a complex one's parts.
template <class U>
struct Bits {
  U re;
  U im;
};

template <class U>
inline U load_bits(device const uchar* from, uint bytes) {
  switch (bytes) {
    case 1: return *from;
    case 2: return *(device const ushort*)from;
    case 4: return *(device const uint*)from;
    default: return U(*(device const ulong*)from);
  }
}

template <class U>
inline Bits<U> load_element(thread const Item& item, device const uchar* from) {
  Bits<U> bits;
  bits.re = load_bits<U>(from, item.key_bytes);
  bits.im = 0;
  if (item.kind == kComplexMagnitude) bits.im = load_bits<U>(from + item.key_bytes, item.key_bytes);
  return bits;
}

template <class U>
inline U sign_of(thread const Item& item) {
  return U(1) << (8 * item.key_bytes - 1);
}

inline uint complex_key(thread const Item& item, uint re, uint im) {
  const uint inf = uint(item.inf_key), largest = greater(re, im);
  if (re == inf || im == inf) return inf;
  if (largest > inf) return uint(item.first_nan);
  if (item.key_bytes == 4) return float_magnitude(re, im);
  return float_to_half_key(float_magnitude(half_to_float_key(re), half_to_float_key(im)));
}

template <class U>
inline U real_key(thread const Item& item, U bits) {
  const U sign = sign_of<U>(item);
  if (item.kind == kSignMagnitude) return bits & (sign - 1);
  if (item.kind == kNegativeZeroNan) return bits == sign ? sign : bits & (sign - 1);
  if (item.kind == kTwosComplement) {
    return (bits & sign) != 0 ? (U(0) - bits) & (sign | (sign - 1)) : bits;
  }
  if (item.kind == kBoolean) return bits != 0 ? 1 : 0;
  return bits;
}

template <class U>
inline U key_of(thread const Item& item, Bits<U> bits) {
  if (item.kind != kComplexMagnitude) return real_key<U>(item, bits.re);
  const uint finite = uint(sign_of<U>(item)) - 1;
  return complex_key(item, uint(bits.re) & finite, uint(bits.im) & finite);
}

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
