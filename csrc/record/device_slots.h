// The slots of one device: scans write their stats there, and a copy brings them to the host.
//
// Slots lie in chunks at fixed addresses. A step's slots are written, copied to the host and reset
// in stream order, so that the next step may write them while the copy is still in flight. Scans
// captured in a graph have slots of their own: every replay writes them, and send_captured() copies
// them.
//
// Everything here runs under the GIL, except for Transfer::wait() and synchronizations.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "../scan/device.h"
#include "held_copies.h"
#include "seen_memory.h"
#include "slot_ref.h"
#include "step_end.h"

namespace overflow_fast {

// A tensor that waits for its scan. The view borrows from the tensor.
struct Unscanned {
  at::Tensor tensor;
  View view;
  SlotRef slot;            // set once its scan is queued
  py::object error;        // or set: why its scan could not be queued
  bool is_output = false;  // of a call, whose caller may have yet to wait for the stream of it
};

class DeviceSlots {
 public:
  explicit DeviceSlots(at::Device device);
  DeviceSlots(const DeviceSlots&) = delete;
  ~DeviceSlots();

  // Checks, once for each `mark` in a row of a thread's, whether its stream captures a graph.
  void notice_capture(size_t mark);
  bool is_capturing() const { return is_capturing_; }
  bool is_capturing_now();

  // Queues the scans of those of `tensors` that are on this device, in as few launches as they
  // fit in, and sets the slot of each, without the device's number, or its error.
  void scan(std::vector<Unscanned>& tensors);

  // Starts the copy of the step's slots, resets them, and does not wait where the device has
  // streams and pinned memory; see StepEnder.
  Transfer send(const std::vector<int64_t>& flag_bits = {});
  at::Tensor take_flags() { return step_end_.take_flags(); }
  int64_t used() const { return step_.used; }
  // The same for the captured scans' slots. Incurs a sync.
  Transfer send_captured();
  void recycle(Transfer&& transfer) { step_end_.recycle(std::move(transfer)); }

  // Makes the host wait for all that was queued on the device.
  void wait_for_all();
  at::Device device() const { return device_; }
  bool has_kernels() const { return api_ != nullptr; }

 private:
  struct Pool {
    std::vector<at::Tensor> chunks;
    int64_t used = 0;
    int64_t capacity() const { return kChunk * static_cast<int64_t>(chunks.size()); }
  };
  // A stream that has written slots since they were reset.
  struct StreamUse {
    int64_t stream;
    std::shared_ptr<DeviceEvent> waited_for;
    std::shared_ptr<DeviceEvent> written;  // null for one that lasts
  };

  int64_t current_stream();
  std::shared_ptr<DeviceEvent> take_event();
  void queue(std::vector<Unscanned>& tensors);
  void launch(Pool& pool, const std::vector<View>& views, int64_t first, int64_t stream);
  void scan_by_torch(std::vector<Unscanned>& tensors);
  bool scan_later(Unscanned& tensor);
  void scan_held();
  void grow(Pool& pool);
  void join_current_stream();
  void join_makers(const std::vector<Unscanned>& tensors);
  void note_written(int64_t stream);
  void synchronize();
  void mark_reset();
  Transfer send(Pool& pool, const std::vector<int64_t>& flag_bits);
  void wait_for_streams();

  at::Device device_;
  Device* api_;                             // null: torch operations scan (torch_scan.h)
  std::unique_ptr<Streams> torch_streams_;  // in its place there
  Streams* streams_;                        // null: every copy is synchronous
  Pool step_;
  Pool captured_;
  SeenMemory seen_;          // of step_
  py::object growth_error_;  // of this step: why a chunk could not be allocated
  size_t mark_ = 0;
  std::thread::id thread_;  // of the mark
  bool is_capturing_ = false;
  std::vector<StreamUse> stream_uses_;
  std::vector<std::shared_ptr<DeviceEvent>> events_;  // made so far, to be recorded again
  std::vector<at::Tensor> retired_;                   // chunks that a stream may still write
  std::shared_ptr<DeviceEvent> last_reset_;
  int64_t reset_stream_ = 0;
  int64_t last_stream_ = 0;  // that used the slots
  int64_t streams_seen_ = 0;
  std::vector<View> views_;  // of one launch; a member to reuse its memory
  StepEnder step_end_;
  HeldCopies copies_;
  std::map<int64_t, py::object> failures_;  // of this step's slots: why a scan did not run
};

}  // namespace overflow_fast
