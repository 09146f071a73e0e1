// Frames with tensors on devices. Each frame's tensors are scanned together, and the stats stay on
// the device until the copy at the end of the step. receive() returns the frames in execution
// order.
//
// Everything here runs under the GIL, which is released while the host waits.
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "device_slots.h"
#include "frame.h"
#include "memo.h"
#include "pinned.h"

namespace overflow_fast {

class Deferred {
 public:
  explicit Deferred(Coverage& coverage) : coverage_(coverage) {}
  Deferred(const Deferred&) = delete;
  ~Deferred();

  // True if a graph capture has begun or ended since the scan that filled `slot`: its stat is then
  // not valid for the current frame.
  bool is_outdated(SlotRef slot, size_t mark);
  // True if a device may write to the host's memory.
  bool has_devices() const { return !devices_.empty(); }
  // Puts off the scan of pinned memory until the step's slots have arrived.
  SlotRef add_pinned(const at::Tensor& tensor);
  void begin(Frame& frame) { frame.sends = num_sends_; }
  // Launches the scans of frame.unscanned, usually one launch per device, and assigns the slots to
  // the entries. An entry whose tensor cannot be scanned gets the reason.
  void scan(Frame& frame, Memo* memo, size_t mark);
  // Starts a new step: graphs captured from now on belong to it.
  void begin_step() { ++step_; }
  // True while a graph is being captured on one of the devices that have slots.
  bool is_capturing();
  bool is_empty() const { return waiting_.empty() && in_flight_.empty(); }
  // True if the stats of a frame up to this one, by its order, have not arrived.
  bool waits_for(int64_t order) const;
  void add(Frame&& frame);

  // Starts the copies of the slots that the frames wait for; does not wait.
  void send();
  // The same for the frames recorded in a capture: receive() returns those that were replayed since
  // the last call. Incurs a sync.
  void send_captured();
  // Returns the frames whose slots have arrived, in execution order, and waits until at most
  // `max_in_flight` sends have not arrived. Returns nothing while a graph is being captured.
  std::vector<Frame> receive(size_t max_in_flight);
  // From now on send() also sets flags, float32 [2] on each device with slots: 1 if a stat was bad
  // since the last take_flags(), in [1] of a gradient, in [0] of anything else.
  void want_flags() { wants_flags_ = true; }
  std::vector<at::Tensor> take_flags();
  // The frames that the next send() folds into flags; none without want_flags().
  std::span<Frame> to_flag() { return wants_flags_ ? std::span(waiting_) : std::span<Frame>(); }
  // The number of times that the host has waited for a device.
  int64_t num_syncs() const { return num_syncs_; }
  int64_t num_sends() const { return num_sends_; }
  // Throws, once, what a device has said to receive(): the program would have met it when it next
  // waited.
  void raise_lost();

 private:
  struct InFlightBatch {
    std::vector<Frame> frames;
    std::vector<Transfer> transfers;  // one for each device
    std::vector<Pinned> pinned;
    bool has_arrived();
  };

  size_t number_of(at::Device device);
  SlotRef slot_of(const Unscanned& tensor);
  void assign_slot(Frame& frame, Entry& entry, const Unscanned& tensor);
  void scan_pinned(InFlightBatch& batch);
  void decode(Frame& frame, const InFlightBatch& batch);
  void drop_idle_graphs(InFlightBatch& batch) const;
  std::vector<int64_t> flag_bits_of(size_t device) const;

  Coverage& coverage_;
  std::deque<InFlightBatch> in_flight_;  // outlives devices_, which wait for what reads its tensors
  std::deque<DeviceSlots> devices_;
  std::vector<Frame> waiting_;
  std::vector<Pinned> pinned_;  // that they list
  std::vector<Frame> captured_;
  int64_t step_ = 1;
  int64_t num_sends_ = 0;
  int64_t num_syncs_ = 0;
  std::exception_ptr lost_;
  bool wants_flags_ = false;
};

}  // namespace overflow_fast
