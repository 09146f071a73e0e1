// How many values of a tensor have underflowed: counted by torch operations when it is asked for,
// since the scan's own pass has no instruction to spare for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "frame.h"

namespace overflow_fast {

class Underflow {
 public:
  struct Counts {
    Place place;
    Dtype dtype;
    int64_t numel;
    int64_t num_zero;
    int64_t num_subnormal;
  };

  // Counts the zeros and subnormals of a tensor of real numbers, on its device. Allocates
  // temporaries of the tensor's size; does not incur a CPU-GPU sync. What cannot be counted is told
  // to `coverage`.
  void add(const Place& place, Dtype dtype, const at::Tensor& tensor, Coverage& coverage);
  // What was counted since the last call. Incurs one CPU-GPU sync per device.
  std::vector<Counts> take();

 private:
  // Of a step that nobody takes no more is kept.
  static constexpr size_t kMaxPending = 1 << 16;

  struct Pending {
    Counts counts;
    at::Tensor on_device;  // int64 [2]: zeros, and zeros and subnormals
  };
  std::vector<Pending> pending_;
};

}  // namespace overflow_fast
