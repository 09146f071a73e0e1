// Scans that wait for those of later frames, so that one launch serves several frames.
//
// For measurements only, never to be a default: between a frame's end and the launch the watched
// program runs on, and not every write to its memory can be detected. A held tensor is
//   - not scanned, and listed as such, if its version counter has changed or its memory was
//     released or exchanged in between;
//   - scanned in its later state, which may miss a bad value or report one that was not there, if
//     it was written to without a change of its version counter: by `.data`, numpy, custom and
//     fused kernels, or because its memory was released and reused.
// The memory is kept until the launch, at most kMaxBytes and one frame more. While a graph is
// captured no scan is held, and scans held before wait for the capture's end.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../scan/layout.h"
#include "../torch_internals/tensor_state.h"

namespace overflow_fast {

class HeldScans {
 public:
  static constexpr size_t kMaxBytes = size_t{64} << 20;

  // With `max_frames` below 2 no scan is held.
  explicit HeldScans(int max_frames) : max_frames_(max_frames) {}

  bool is_wanted() const { return max_frames_ > 1; }
  bool is_empty() const { return held_.empty(); }
  // Begins the scans of a frame, into slots from `first_slot` on, directly after those held before.
  void begin_frame(int64_t first_slot, int64_t stream);
  void add(const at::Tensor& tensor, const View& view);
  // True if the launch must not wait any longer.
  bool is_full() const { return num_frames_ >= max_frames_ || bytes_ > kMaxBytes || has_unknown_; }

  // The views to scan, valid until the next call. The view of a tensor that has changed is empty.
  std::vector<View> views() const;
  int64_t first_slot() const { return first_slot_; }
  int64_t stream() const { return stream_; }
  void clear();

 private:
  struct Held {
    c10::Storage storage;
    WriteCounter writes;
    const void* memory_then;
    size_t bytes_then;
    View view;
    size_t sizes_at;  // where its sizes and strides begin in sizes_
    bool is_unchanged() const;
  };

  int max_frames_;
  int num_frames_ = 0;
  size_t bytes_ = 0;
  bool has_unknown_ = false;  // a tensor without a version counter
  int64_t first_slot_ = 0;
  int64_t stream_ = 0;
  std::vector<Held> held_;
  std::vector<int64_t> sizes_;
};

}  // namespace overflow_fast
