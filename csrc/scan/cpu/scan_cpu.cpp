#include "scan_cpu.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace overflow_fast::cpu {

namespace {

constexpr int kMaxTasks = 256;  // their slots lie on the stack, 8 KiB

// Walks elements [begin, end) of a layout, counted in the layout's own order.
class Walk {
 public:
  Walk(const Layout& layout, const View& view)
      : dims_(layout.dims()),
        data_(static_cast<const char*>(view.data)),
        itemsize_(dtype_info(view.dtype).itemsize),
        rows_(kernels().rows[static_cast<int>(view.dtype)]),
        strided_(kernels().strided[static_cast<int>(view.dtype)]) {}

  void scan(int64_t begin, int64_t end, Slot& slot) const {
    if (dims_.empty()) return rows_(data_, 1, 0, 1, slot);
    const int64_t length = dims_[0].size;
    if (begin % length != 0) {
      const int64_t stop = std::min(end, (begin / length + 1) * length);
      scan_row(begin / length, begin % length, stop - begin, slot);
      begin = stop;
    }
    scan_full_rows(begin / length, end / length, slot);
    if (end > begin && end % length != 0) scan_row(end / length, 0, end % length, slot);
  }

 private:
  bool is_contiguous_row() const { return dims_[0].stride == 1; }

  const char* row_start(int64_t row) const {
    int64_t offset = 0;
    for (size_t i = 1; i < dims_.size(); ++i) {
      offset += row % dims_[i].size * dims_[i].stride;
      row /= dims_[i].size;
    }
    return data_ + offset * itemsize_;
  }

  void scan_row(int64_t row, int64_t first, int64_t length, Slot& slot) const {
    const int64_t stride = dims_[0].stride * itemsize_;
    const char* start = row_start(row) + first * stride;
    if (is_contiguous_row()) {
      rows_(start, 1, 0, length, slot);
    } else {
      strided_(start, length, stride, slot);
    }
  }

  // Passes rows that follow each other along dims_[1] to the kernel together.
  void scan_full_rows(int64_t row, int64_t end, Slot& slot) const {
    if (!is_contiguous_row() || dims_.size() < 2) {
      for (; row < end; ++row) scan_row(row, 0, dims_[0].size, slot);
      return;
    }
    while (row < end) {
      const int64_t left_in_plane = dims_[1].size - row % dims_[1].size;
      const int64_t count = std::min(left_in_plane, end - row);
      rows_(row_start(row), count, dims_[1].stride * itemsize_, dims_[0].size, slot);
      row += count;
    }
  }

  const Dims& dims_;
  const char* data_;
  int64_t itemsize_;
  ScanRows rows_;
  ScanStrided strided_;
};

struct Tasks {
  const Walk& walk;
  int64_t numel;
  int64_t per_task;
  std::array<Slot, kMaxTasks> slots;

  static void run(int64_t index, void* context) {
    auto& self = *static_cast<Tasks*>(context);
    const int64_t begin = index * self.per_task;
    Slot slot;
    self.walk.scan(begin, std::min(self.numel, begin + self.per_task), slot);
    self.slots[index] = slot;
  }
};

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
#if defined(__x86_64__)
    const char* asked = std::getenv("OVERFLOW_FAST_ISA");
    const bool allow_avx2 = asked == nullptr || std::strcmp(asked, "baseline") != 0;
    const bool allow_avx512 = allow_avx2 && (asked == nullptr || std::strcmp(asked, "avx2") != 0);
    if (allow_avx512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return kAvx512Kernels;
    }
    if (allow_avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
        __builtin_cpu_supports("fma")) {
      return kAvx2Kernels;
    }
#endif
    return kBaselineKernels;
  }();
  return chosen;
}

void scan(const View& view, const ParallelFor& parallel, Slot& slot) {
  const Layout layout(view);
  const int64_t numel = layout.numel();
  if (numel == 0) return;
  const Walk walk(layout, view);
  const int64_t bytes = numel * dtype_info(view.dtype).itemsize;
  const int64_t num_tasks =
      std::min<int64_t>({bytes / kMinTaskBytes, parallel.num_threads, kMaxTasks});
  if (num_tasks < 2) return walk.scan(0, numel, slot);

  Tasks tasks{walk, numel, (numel + num_tasks - 1) / num_tasks, {}};
  parallel.run(num_tasks, Tasks::run, &tasks);
  for (int64_t i = 0; i < num_tasks; ++i) combine(slot, tasks.slots[i]);
}

}  // namespace overflow_fast::cpu
