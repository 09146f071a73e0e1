// The torch-free scan core against a scalar reference, to be run under the sanitizers. Each
// tensor lies in a heap block that ends with its last byte, so that a read past it is caught.
#include <cstdio>
#include <thread>

#include "../../csrc/scan/cpu/kernels.h"
#include "../../csrc/scan/cpu/scan_cpu.h"
#include "reference.h"

namespace {

using namespace overflow_fast;

void run_on_threads(int64_t num_tasks, void (*task)(int64_t, void*), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < num_tasks; ++i) threads.emplace_back(task, i, context);
  for (std::thread& thread : threads) thread.join();
}

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
