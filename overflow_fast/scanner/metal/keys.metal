// How bits become keys in MPS's kernel, and where a work list says that they lie. Compiled as one
// text with scan.metal, which follows.
#include <metal_stdlib>
using namespace metal;

#ifndef OF_THREADS
#define OF_THREADS 256  // of a threadgroup, as csrc/scan/mps/work_list.h has them
#endif

constant constexpr uint kThreads = OF_THREADS;
constant constexpr uint kItemWords = 8;

// As in csrc/scan/dtype.h.
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

// binary16 to binary32 and back as in csrc/scan/half.h, for finite magnitudes.
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
