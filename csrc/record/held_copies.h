// Copies of small tensors on a device without kernels, which are scanned together: each operation
// there takes microseconds, whatever it reads, and one reduction serves all tensors of a size.
//
// A copy is made when the tensor is to be scanned, in the order of the stream, so that later writes
// do not matter. All copies are of one stream and of slots that follow each other.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "../scan/scan.h"

namespace overflow_fast {

class HeldCopies {
 public:
  // Of 16 MiB and 512 tensors an operation more or less is lost in the time of the others.
  static constexpr int64_t kMaxBytes = int64_t{16} << 20;
  static constexpr size_t kMaxTensors = 512;

  bool is_empty() const { return held_.empty(); }
  bool is_full() const { return bytes_ >= kMaxBytes || held_.size() >= kMaxTensors; }
  // True if the tensor of a slot can join those that are held.
  bool is_next(int64_t slot, int64_t stream) const;
  // Copies a tensor, or reduces it at once where it is large. Throws what the device throws.
  void add(const at::Tensor& tensor, int64_t slot, int64_t stream);
  int64_t first_slot() const { return first_slot_; }
  int64_t stream() const { return stream_; }

  // Scans them into slots from `first` on, and holds none any more. Returns for each the reason why
  // it could not be scanned, empty if it was.
  std::vector<std::string> scan(const at::Tensor& slots, int64_t first);

 private:
  struct Held {
    ToReduce part;
    at::ScalarType dtype;
  };
  std::vector<Held> held_;
  int64_t bytes_ = 0;
  int64_t first_slot_ = 0;
  int64_t stream_ = 0;
};

}  // namespace overflow_fast
