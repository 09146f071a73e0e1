// What the recorder needs of a device that has kernels of ours, free of torch. CUDA's stands in
// cuda/; for a device without one see torch_scan.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "layout.h"
#include "stat.h"

namespace overflow_fast {

// How many flags a step's slots are folded into.
constexpr int64_t kNumFlags = 2;

// What is done with a step's slots, in one launch.
struct SlotsEnd {
  Slot* slots;  // are reset
  int64_t count;
  // Unless null, masks[row * mask_stride + i] says which kinds of non-finite values of slot i put
  // up flag `row`.
  const int64_t* masks;
  int64_t mask_stride;
  float* flags;     // [kNumFlags]
  bool sets_flags;  // both, so that it does not matter what they were
  // Unless null, pinned memory that gets the slots. The number at `epoch`, in pinned memory too,
  // becomes `number` when all slots of this and of earlier launches are there.
  Slot* host;
  uint64_t* epoch;
  uint64_t number;
};

// A point in the work of a stream. Streams are known by torch's ids.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  virtual void record(int64_t stream) = 0;
  // Polls a number in the host's memory, if there is one, else asks the driver.
  virtual bool has_passed() = 0;
  // The host waits for it: the one sync there is. Throws if a polled number has not come then.
  virtual void wait() = 0;
  // What `stream` is given from now on waits for it; the host does not.
  virtual void hold_up(int64_t stream) = 0;

  // A launch before record() makes *epoch `number`; it outlives the last has_passed() and wait().
  void poll(uint64_t* epoch, uint64_t number) {
    epoch_ = epoch;
    number_ = number;
  }

 protected:
  bool is_polled() const { return epoch_ != nullptr; }
  // Acquires what was written before the number.
  bool has_number() const { return std::atomic_ref(*epoch_).load() == number_; }

 private:
  uint64_t* epoch_ = nullptr;
  uint64_t number_ = 0;
};

// All calls may throw; what a call that threw was to do is left undone.
class Device {
 public:
  virtual ~Device() = default;
  // Queues the scan of views[i] into slots[i], device memory, on a stream.
  virtual void scan(const View* views, int64_t count, Slot* slots, int64_t stream) = 0;
  // Queues what is done with a step's slots on the current stream.
  virtual void end_step(const SlotsEnd& end) = 0;
  virtual int64_t current_stream() = 0;
  // Whether the current stream records a graph instead of running.
  virtual bool is_capturing() = 0;
  virtual std::unique_ptr<DeviceEvent> make_event() = 0;
  // The host waits for all streams.
  virtual void synchronize() = 0;
};

}  // namespace overflow_fast
