// Scans that wait for those of later frames, so that one launch serves several frames.
//
// To be measured, never to be a default: between a frame's end and the launch the watched program
// goes on, and nothing tells of every write to its memory in time. What was held is
//   - not scanned, and listed as such, if its version counter has moved or its memory has been
//     given up or exchanged since;
//   - scanned as it is later, which may miss what was bad or blame what was not, if it was written
//     to by what moves no version counter: `.data`, numpy, custom and fused kernels, or memory
//     that was given up and taken back.
// The memory is kept until the launch, of kMaxBytes at most and one frame's more. While a graph is
// captured nothing is held, and what was held before waits for its end.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../scan/layout.h"
#include "../torch_internals/tensor_state.h"

namespace overflow_fast {

class HeldScans {
 public:
  static constexpr size_t kMaxBytes = size_t{64} << 20;

  // With `max_frames` below 2 nothing is to be held.
  explicit HeldScans(int max_frames) : max_frames_(max_frames) {}

  bool is_wanted() const { return max_frames_ > 1; }
  bool is_empty() const { return held_.empty(); }
  // The scans of one frame, into slots from `first_slot` on, right behind those held before.
  void begin_frame(int64_t first_slot, int64_t stream);
  void add(const at::Tensor& tensor, const View& view);
  // Whether the launch has to come now.
  bool is_full() const { return num_frames_ >= max_frames_ || bytes_ > kMaxBytes || has_unknown_; }

  // Valid until the next call; empty for what is no longer what it was.
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
    View view;  // its sizes and strides stand in sizes_, from here on
    size_t sizes_at;
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
