// The torch-free scan core against a scalar reference, to be run under the sanitizers. Each
// tensor lies in a heap block that ends with its last byte, so that a read past it is caught.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/cpu/kernels.h"
#include "../../csrc/cpu/scan_cpu.h"

namespace {

using namespace overflow_fast;

std::mt19937_64 generator(20240229);

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

// A heap block whose used part ends where the block ends.
struct Block {
  explicit Block(int64_t bytes) : bytes(bytes), memory(static_cast<char*>(std::malloc(bytes))) {}
  ~Block() { std::free(memory); }
  int64_t bytes;
  char* memory;
};

void fill(Block& block, bool keep_small) {
  for (int64_t i = 0; i < block.bytes; ++i) {
    block.memory[i] = static_cast<char>(generator());
    // Small exponents in every format, so that most runs are clean.
    if (keep_small) block.memory[i] &= 0x3f;
  }
}

uint64_t read_bits(const char* from, int32_t bytes) {
  uint64_t bits = 0;
  std::memcpy(&bits, from, bytes);
  return bits;
}

uint64_t reference_key(const DtypeInfo& info, const char* element) {
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

void reference_element(const DtypeInfo& info, const char* element, Slot& slot) {
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

void reference(const View& view, int64_t dim, const char* at, Slot& slot) {
  const DtypeInfo& info = dtype_info(view.dtype);
  if (dim == view.ndim) return reference_element(info, at, slot);
  const int64_t steps =
      view.strides[dim] == 0 ? std::min<int64_t>(view.sizes[dim], 1) : view.sizes[dim];
  for (int64_t i = 0; i < steps; ++i) {
    reference(view, dim + 1, at + i * view.strides[dim] * info.itemsize, slot);
  }
}

void run_on_threads(int64_t num_tasks, void (*task)(int64_t, void*), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < num_tasks; ++i) threads.emplace_back(task, i, context);
  for (std::thread& thread : threads) thread.join();
}

struct Shape {
  std::vector<int64_t> sizes, strides;
  int64_t span = 1;  // elements from the first to the last
};

// Dimensions in random order, with gaps, some of them expanded.
Shape draw_shape(int64_t max_numel) {
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

bool same(const Slot& a, const Slot& b) { return std::memcmp(&a, &b, sizeof(Slot)) == 0; }

void check(Dtype dtype, const Shape& shape, int64_t offset, bool keep_small) {
  const DtypeInfo& info = dtype_info(dtype);
  Block block(offset + shape.span * info.itemsize);
  fill(block, keep_small);
  const View view{block.memory + offset, dtype, shape.sizes.data(), shape.strides.data(),
                  static_cast<int64_t>(shape.sizes.size())};
  Slot expected, found;
  cpu::scan(view, {static_cast<int>(draw(1, 3)), run_on_threads}, found);
  if (info.is_complex()) return;  // its magnitudes are checked against torch
  reference(view, 0, block.memory + offset, expected);
  if (same(found, expected)) return;
  std::printf("dtype %d, offset %ld, %ld dims: found min %lx max %lx, expected min %lx max %lx\n",
              static_cast<int>(dtype), offset, view.ndim, found.min_key, found.max_key,
              expected.min_key, expected.max_key);
  std::exit(1);
}

}  // namespace

int main() {
  int64_t num_checks = 0;
  for (int dtype = 0; dtype < static_cast<int>(Dtype::kCount); ++dtype) {
    for (int round = 0; round < 300; ++round, ++num_checks) {
      const int64_t max_numel = round % 50 == 0 ? 300000 : 2000;
      check(static_cast<Dtype>(dtype), draw_shape(max_numel), draw(0, 17), round % 3 != 0);
    }
    const int64_t empty = 0, stride = 1;
    Slot slot;
    cpu::scan({nullptr, static_cast<Dtype>(dtype), &empty, &stride, 1}, {2, run_on_threads}, slot);
    if (!slot.is_empty()) return 1;
  }
  std::printf("scan core, %s: %ld checks passed\n", cpu::kernels().isa, num_checks);
  return 0;
}
