// Collects the frames of a step: what each module was given and returned, as entries with slots.
//
// On the CPU a slot is filled when its entry is recorded, and a frame can be judged at once. On
// a device the slots stay there, and frames wait until the step's one sync (resolve). Either
// way a frame is judged in execution order by the same code, and ends in the history.
//
// Everything here runs under the GIL, except for the scan of a large tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "labels.h"
#include "layout.h"
#include "memo.h"
#include "stat.h"

namespace overflow_fast {

enum class EntryKind : uint8_t { kTensor, kNone, kNotTensor, kNotScanned };

// How an entry is listed.
struct Listing {
  LabelId label;
  bool is_quiet = false;             // only when it is bad
  bool allows_negative_inf = false;  // an additive mask by its place: -inf is no alarm
};

struct Entry {
  Slot stat;       // filled when the frame is judged
  int64_t slot;    // index into the host slots or, from kDeviceSlots on, a device's
  py::object why;  // kNotScanned: the reason
  int64_t numel;
  Listing listing;
  EntryKind kind;
  Dtype dtype;

  bool is_bad() const {
    return kind == EntryKind::kTensor && !stat.is_finite() &&
           !(listing.allows_negative_inf && stat.has_only_negative_inf());
  }
};

struct Frame {
  uint32_t module;
  py::object type;  // the module's class when the hook ran
  int64_t batch;
  bool opens_batch;
  bool is_recomputed;
  bool is_bad = false;  // of the entries whose stat is known so far
  bool waits = false;   // some stat is still on its device
  std::vector<Entry> entries;
};

struct Options {
  bool strict_compat = false;  // look where transformers looks, nowhere else
  bool list_kwargs = false;    // list keyword inputs like positional ones
  bool use_memo = true;
  bool force_composite = false;  // treat the CPU as a device without a kernel
};

// Slots in fixed-address chunks on one device.
class DeviceSlots {
 public:
  static constexpr int64_t kChunk = 4096;

  explicit DeviceSlots(at::Device device) : device_(device) {}
  int64_t scan(const at::Tensor& tensor);
  // One copy to the host per chunk in use; resets the slots. Incurs a sync.
  std::vector<Slot> take();

 private:
  at::Device device_;
  std::vector<at::Tensor> chunks_;
  int64_t used_ = 0;
};

// What the exception being handled says, in one text. Rethrows what must not be held up.
py::str current_exception_text();

class Recorder {
 public:
  Recorder(std::optional<int64_t> max_frames, Options options);

  const Options& options() const { return options_; }
  LabelTable& labels() { return labels_; }

  // A frame is built by add_*() calls on it and given back by finish(). finish() returns true if
  // the frame was judged and somebody should look at it; it is the caller's to keep() then.
  Frame begin_frame(uint32_t module, py::object type, bool is_recomputed);
  void add_tensor(Frame& frame, Listing listing, PyObject* tensor);
  void add_not_scanned(Frame& frame, Listing listing, py::object why);
  void add_none(Frame& frame, Listing listing);
  void add_not_tensor(Frame& frame, Listing listing);
  bool finish(Frame& frame);

  // Brings the slots of waiting frames to the host and hands those frames out in order; the
  // caller gives each to judge(). Incurs one sync per device that was used.
  std::vector<Frame> resolve();
  // True if the frame is bad or every frame is asked for; otherwise it goes into the history.
  bool judge(Frame& frame);
  void keep(Frame&& frame);

  // The memo and the slots of a step end with it. Waiting frames must have been resolved.
  void end_step();
  void begin_batch(int64_t number) {
    batch_ = number;
    opens_batch_ = true;
  }

  // The batch that has frames: the one that runs or, between two, the one before.
  int64_t last_batch() const { return opens_batch_ && batch_ > 0 ? batch_ - 1 : batch_; }

  std::deque<Frame>& history() { return history_; }
  const std::deque<Frame>& history() const { return history_; }
  std::optional<int64_t> max_frames;
  bool in_step = false;  // the root's forward is running
  bool watches_every_frame = false;
  int64_t total_calls = 0;
  int64_t bytes_scanned = 0;
  int64_t tensors_scanned = 0;
  int64_t tensors_listed = 0;
  bool has_waiting_frames() const { return !waiting_.empty(); }

 private:
  static constexpr int64_t kDeviceSlots = int64_t{1} << 48;
  // A smaller tensor on the host is scanned again sooner than it is remembered: what remembering
  // costs is the tensor's own memory, which is given back only when the step ends.
  static constexpr int64_t kMinMemoBytes = 4096;

  // Whether a tensor's stat is known as soon as it is scanned.
  bool is_here(const at::Tensor& tensor) const {
    return tensor.is_cpu() && !options_.force_composite;
  }
  int64_t scan_to_slot(const at::Tensor& tensor, const View& view);
  int64_t scan_on_device(const at::Tensor& tensor);
  void add_scanned(Frame& frame, Listing listing, const at::Tensor& tensor, const View& view);
  void add_stat(Frame& frame, Listing listing, const at::Tensor& tensor, Memo::Known known);
  void add_indirect(Frame& frame, Listing listing, PyObject* tensor);

  Options options_;
  LabelTable labels_;
  Memo memo_;
  size_t frame_mark_ = 0;
  std::vector<Slot> host_slots_;
  std::vector<std::pair<at::Device, DeviceSlots>> devices_;
  std::vector<Frame> waiting_;
  std::vector<Entry> spare_;  // the last dropped frame's memory
  std::deque<Frame> history_;
  int64_t batch_ = 0;
  bool opens_batch_ = true;
};

}  // namespace overflow_fast
