// The numbers of values of a tensor that have underflowed, or stand at the end of their dtype:
// counted by torch operations, on request, since the scan's own pass has no instruction to spare.
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
    int64_t num_limit = 0;     // of the dtype's largest magnitude
    int64_t num_positive = 0;  // those of them that are positive
  };

  // Counts zeros, subnormals and largest numbers of a tensor of reals, on its device. Allocates
  // temporaries of the tensor's size; does not incur a CPU-GPU sync. A failure is counted in
  // `coverage`.
  void add(const Place& place, Dtype dtype, const at::Tensor& tensor, Coverage& coverage);
  bool is_empty() const { return pending_.empty(); }
  // The counts since the last call. Incurs one CPU-GPU sync per device.
  std::vector<Counts> take();

 private:
  // Limits the memory if take() is never called.
  static constexpr size_t kMaxPending = 1 << 16;

  struct Pending {
    Counts counts;
    at::Tensor on_device;  // int64 [4]: zeros; with subnormals; largest ones; positive ones
  };
  std::vector<Pending> pending_;
};

}  // namespace overflow_fast
