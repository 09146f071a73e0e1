// The source of MPS's kernel, run by the emulation, against the scalar reference: lists of tensors
// of any dtype and layout, each in a heap block that ends with its last byte.
#include <cstdio>
#include <cstring>
#include <memory>

#include "../../csrc/scan/mps/work_list.h"
#include "metal_emulation/launch.h"
#include "reference.h"

namespace {

using namespace overflow_fast;

struct Tensor {
  Tensor(Dtype dtype, Shape drawn, int64_t offset, bool keep_small)
      : shape(std::move(drawn)), block(offset + shape.span * dtype_info(dtype).itemsize) {
    fill(block, keep_small);
    each = {{block.memory + offset, dtype, shape.sizes.data(), shape.strides.data(),
             static_cast<int64_t>(shape.sizes.size())},
            offset};
  }
  Shape shape;
  Block block;
  mps::BufferView each;
};

std::unique_ptr<Tensor> draw_tensor(int64_t max_numel) {
  const auto dtype = static_cast<Dtype>(draw(0, static_cast<int64_t>(Dtype::kCount) - 1));
  const int64_t offset = draw(0, 17) * dtype_info(dtype).itemsize;
  return std::make_unique<Tensor>(dtype, draw_shape(max_numel), offset, draw(0, 2) != 0);
}

Slot expected_slot(const View& view) {
  Slot slot;
  if (view.dtype == Dtype::kComplex128) return slot;  // not the kernel's
  reference(view, 0, static_cast<const char*>(view.data), slot);
  return slot;
}

void run(const std::vector<std::unique_ptr<Tensor>>& tensors, std::vector<Slot>& slots) {
  for (size_t first = 0; first < tensors.size();) {
    mps::WorkList list;
    std::vector<const void*> buffers;
    for (size_t i = first; i < tensors.size() && list.add(tensors[i]->each); ++i) {
      buffers.push_back(tensors[i]->each.view.data);
    }
    const int64_t capacity = list.num_items() <= 4 ? 4 : mps::kMaxItems;
    buffers.resize(capacity, buffers.front());
    const std::vector<int64_t> words = list.words();
    if (words.size() > mps::kMaxWords) std::exit(1);
    const std::unique_ptr<int64_t[]> exact(new int64_t[words.size()]);
    std::memcpy(exact.get(), words.data(), words.size() * sizeof(int64_t));
    metal_emulation::launch(capacity, &slots[first], exact.get(), buffers.data(),
                            list.num_blocks());
    first += list.num_items();
  }
}

void check_list(int64_t count, int64_t max_numel) {
  std::vector<std::unique_ptr<Tensor>> tensors;
  for (int64_t i = 0; i < count; ++i) {
    tensors.push_back(draw_tensor(draw(0, 9) == 0 ? 1 : max_numel));
    if (draw(0, 9) == 0)
      tensors.back() = std::make_unique<Tensor>(Dtype::kFloat32, Shape{{0}, {1}, 0}, 4, true);
  }
  std::vector<Slot> slots(count);
  run(tensors, slots);
  for (int64_t i = 0; i < count; ++i) {
    const View& view = tensors[i]->each.view;
    const Slot expected = expected_slot(view);
    if (same(slots[i], expected)) continue;
    std::printf(
        "tensor %ld of %ld, dtype %d, %ld dims: found %lx %lx %lx %lx, expected %lx %lx "
        "%lx %lx\n",
        i, count, static_cast<int>(view.dtype), view.ndim, slots[i].min_key, slots[i].max_key,
        slots[i].num_nan, slots[i].infs, expected.min_key, expected.max_key, expected.num_nan,
        expected.infs);
    std::exit(1);
  }
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// How a magnitude in double is rounded is seen only where the root lies within 2^-53 of the middle
// between two floats. Returns whether this pair is such a one.
bool check_magnitude(float x, float y) {
  const double square = double{x} * x + double{y} * y;
  const double root = std::sqrt(square);
  const auto once = static_cast<float>(root);
  const uint32_t found = metal_kernels::float_magnitude(bits_of(x), bits_of(y));
  if (found != bits_of(once)) {
    std::printf("|%a + %ai|: found %a, expected %a\n", x, y, float_of(found), once);
    std::exit(1);
  }
  const long double exact = std::sqrt(static_cast<long double>(square));
  return static_cast<float>(exact) != once;
}

// Pairs whose squares' sum is next to the square of a middle: a second part that brings a first
// one just half a unit further.
void check_magnitudes() {
  int64_t num_hard = 0;
  for (int i = 0; i < 1000000; ++i) {
    const auto x = float_of(static_cast<uint32_t>(draw(1, 0x7f7fffff)));
    check_magnitude(x, float_of(static_cast<uint32_t>(draw(0, 0x7f7fffff))));
    const float near = float_of(0x3f800000 | (bits_of(x) & 0x7fffff));
    const int64_t units = draw(0, 3000);
    const double half = 0x1p-24 * static_cast<double>(1 + 2 * units);
    const auto y = static_cast<float>(std::sqrt(half * (2 * double{near} + half)));
    num_hard += check_magnitude(near, y) + check_magnitude(y, near);
    check_magnitude(near, std::nextafterf(y, 0));
    const int exponent = static_cast<int>(draw(-149, 0));
    check_magnitude(std::ldexp(near, exponent), std::ldexp(y, exponent));
  }
  std::printf("MPS kernel: magnitudes passed, %ld of them rounded twice\n", num_hard);
  if (num_hard == 0) std::exit(1);
}

}  // namespace

int main() {
  check_magnitudes();
  int64_t num_tensors = 0;
  for (int round = 0; round < 300; ++round) {
    const int64_t count = draw(1, round % 10 == 9 ? 60 : 6);
    check_list(count, count > 20 ? 300 : round % 20 == 0 ? 90000 : 3000);
    num_tensors += count;
  }
  std::printf("MPS kernel, emulated: %ld tensors passed\n", num_tensors);
  return 0;
}
