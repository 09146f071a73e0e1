// Frames with tensors on devices: each frame's tensors are scanned together, the stats stay where
// they are until the step's copy brings them, and then the frames are handed out in order.
//
// Everything here runs under the GIL, which is let go while the host waits.
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "device_slots.h"
#include "frame.h"
#include "memo.h"

namespace overflow_fast {

class Deferred {
 public:
  explicit Deferred(Coverage& coverage) : coverage_(coverage) {}

  // Whether a graph's capture has begun or ended since the scan that filled `slot`, so that the
  // stat there is not this frame's.
  bool is_outdated(SlotRef slot, size_t mark);
  void begin(Frame& frame) { frame.sends = num_sends_; }
  // Launches the scans of frame.unscanned, one launch per device as a rule, and tells the entries
  // their slots. What cannot be scanned says so.
  void scan(Frame& frame, Memo* memo, size_t mark);
  // What a graph captures from now on is a step of its own.
  void begin_step() { ++step_; }
  // Whether a graph is being captured on one of the devices that have slots.
  bool is_capturing();
  bool is_empty() const { return waiting_.empty() && in_flight_.empty(); }
  void add(Frame&& frame);

  // Starts the copies of the slots that the frames wait for; does not wait.
  void send();
  // The same for the frames that captures recorded: those that were replayed since they were
  // last sent will be among the next to come. Incurs a sync.
  void send_captured();
  // Hands out the frames whose slots have come, in order, and waits for slots until at most
  // `max_in_flight` sends have not come. Hands out nothing while a graph is being captured.
  std::vector<Frame> receive(size_t max_in_flight);
  // From now on flags are made of what is sent: for each device with slots, on it, float32 [2]:
  // whether a stat was bad since the last call, of gradients (1) and of everything else (0).
  void want_flags() { wants_flags_ = true; }
  std::vector<at::Tensor> take_flags();
  // The frames that flags are made of next; none where nobody wants flags.
  std::span<Frame> to_flag() { return wants_flags_ ? std::span(waiting_) : std::span<Frame>(); }
  // How often the host has waited for a device.
  int64_t num_syncs() const { return num_syncs_; }
  int64_t num_sends() const { return num_sends_; }

 private:
  struct InFlightBatch {
    std::vector<Frame> frames;
    std::vector<Transfer> transfers;  // one for each device
    bool has_arrived();
  };

  size_t number_of(at::Device device);
  SlotRef slot_of(const Unscanned& tensor);
  void assign_slot(Entry& entry, const Unscanned& tensor);
  void decode(Frame& frame, const std::vector<Transfer>& transfers);
  void drop_idle_graphs(InFlightBatch& batch) const;
  std::vector<int64_t> masks_of(size_t device) const;

  Coverage& coverage_;
  std::deque<DeviceSlots> devices_;
  std::vector<Frame> waiting_;
  std::deque<InFlightBatch> in_flight_;
  std::vector<Frame> captured_;
  int64_t step_ = 1;
  int64_t num_sends_ = 0;
  int64_t num_syncs_ = 0;
  bool wants_flags_ = false;
};

}  // namespace overflow_fast
