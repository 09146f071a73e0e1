// The CUDA kernel's source, run by the emulation, against the scalar reference: lists of tensors
// of any dtype and layout, each in a heap block that ends with its last byte.
#include <cstdio>
#include <memory>

#include "../../csrc/cpu/scan_cpu.h"
#include "../../csrc/cuda/scan_kernel.h"
#include "reference.h"

namespace {

using namespace overflow_fast;

struct Tensor {
  Tensor(Dtype dtype, Shape drawn, int64_t offset, bool keep_small)
      : shape(std::move(drawn)), block(offset + shape.span * dtype_info(dtype).itemsize) {
    fill(block, keep_small);
    view = {block.memory + offset, dtype, shape.sizes.data(), shape.strides.data(),
            static_cast<int64_t>(shape.sizes.size())};
  }
  Shape shape;
  Block block;
  View view;
};

std::unique_ptr<Tensor> draw_tensor(int64_t max_numel) {
  const auto dtype = static_cast<Dtype>(draw(0, static_cast<int64_t>(Dtype::kCount) - 1));
  // Mostly aligned to the element, as torch's tensors are.
  const int64_t offset = draw(0, 17) * (draw(0, 7) == 0 ? 1 : dtype_info(dtype).itemsize);
  return std::make_unique<Tensor>(dtype, draw_shape(max_numel), offset, draw(0, 2) != 0);
}

// Of a complex tensor the CPU's scan is the reference: magnitudes must agree to the bit.
Slot expected_slot(const View& view) {
  Slot slot;
  if (dtype_info(view.dtype).is_complex()) {
    cpu::scan(view, {1, nullptr}, slot);
  } else {
    reference(view, 0, static_cast<const char*>(view.data), slot);
  }
  return slot;
}

void check_list(int64_t count, int64_t max_numel) {
  std::vector<std::unique_ptr<Tensor>> tensors;
  std::vector<View> views;
  const int64_t none = 0, one = 1;
  for (int64_t i = 0; i < count; ++i) {
    tensors.push_back(draw_tensor(max_numel));
    views.push_back(tensors.back()->view);
    if (draw(0, 9) == 0) views.back() = {nullptr, Dtype::kFloat32, &none, &one, 1};
  }
  std::vector<Slot> slots(count);
  const cuda::Target target{nullptr, static_cast<int>(draw(1, 5)), 1, draw(0, 1) == 1};
  if (cuda::launch_scan(views.data(), count, slots.data(), target) != cudaSuccess) std::exit(1);
  for (int64_t i = 0; i < count; ++i) {
    const Slot expected = expected_slot(views[i]);
    if (same(slots[i], expected)) continue;
    std::printf("tensor %ld of %ld, dtype %d, %ld dims: found %lx %lx %lx %lx, expected %lx %lx\n",
                i, count, static_cast<int>(views[i].dtype), views[i].ndim, slots[i].min_key,
                slots[i].max_key, slots[i].num_nan, slots[i].infs, expected.min_key,
                expected.max_key);
    std::exit(1);
  }
}

// A run that many blocks share, with a nan before its first vector and one behind its last: each
// is counted once.
void check_ends(Dtype dtype) {
  const DtypeInfo& info = dtype_info(dtype);
  const int64_t numel = 100001;
  Tensor tensor(dtype, {{numel}, {1}, numel}, info.itemsize, true);
  char* first = tensor.block.memory + info.itemsize;
  std::memcpy(first, &info.first_nan, info.itemsize);
  std::memcpy(first + (numel - 1) * info.itemsize, &info.first_nan, info.itemsize);
  Slot slot;
  if (cuda::launch_scan(&tensor.view, 1, &slot, {nullptr, 5, 1, true}) != cudaSuccess ||
      slot.num_nan != 2) {
    std::printf("dtype %d: %ld nans found, expected 2\n", static_cast<int>(dtype), slot.num_nan);
    std::exit(1);
  }
}

void check_num_launches(int64_t count, bool takes_large_lists, int expected) {
  const float ones[4] = {1, 1, 1, 1};
  const int64_t size = 4, stride = 1;
  const std::vector<View> views(count, {ones, Dtype::kFloat32, &size, &stride, 1});
  std::vector<Slot> slots(count);
  emulation::num_launches = 0;
  cuda::launch_scan(views.data(), count, slots.data(), {nullptr, 1, 1, takes_large_lists});
  if (emulation::num_launches == expected) return;
  std::printf("%ld tensors took %d launches, not %d\n", count, emulation::num_launches, expected);
  std::exit(1);
}

}  // namespace

int main() {
  check_num_launches(0, true, 0);
  for (const int64_t count : {1, 4, 5, 88}) check_num_launches(count, true, 1);
  check_num_launches(1000, true, 2);
  check_num_launches(1000, false, 12);
  for (int i = 0; i < static_cast<int>(Dtype::kCount); ++i) {
    const DtypeInfo& info = kDtypes[i];
    if (info.first_nan != kNoKey && !info.is_complex()) check_ends(info.dtype);
  }

  int64_t num_tensors = 0;
  for (int round = 0; round < 400; ++round) {
    const int64_t count = round % 100 == 99 ? draw(985, 1100) : draw(1, round % 10 == 9 ? 200 : 6);
    check_list(count, count > 100 ? 100 : round % 20 == 0 ? 60000 : 3000);
    num_tensors += count;
  }
  std::printf("CUDA kernel, emulated: %ld tensors passed\n", num_tensors);
  return 0;
}
