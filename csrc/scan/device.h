// The interface of a device that has kernels of its own here, free of torch. CUDA's is in cuda/;
// for a device without one see torch_scan.h and torch_streams.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "layout.h"
#include "seen_kinds.h"
#include "stat.h"

namespace overflow_fast {

// The number of flags that a step's slots are folded into.
constexpr int64_t kNumFlags = 2;

// The end of a step, in one launch: slots are folded into flags, copied to the host and reset.
struct SlotsEnd {
  Slot* slots;
  int64_t count;
  // Unless null, flag_bits[row * flag_stride + i] holds the kinds of non-finite values of slot i
  // that set flag `row`.
  const int64_t* flag_bits;
  int64_t flag_stride;
  float* flags;     // [kNumFlags]
  bool sets_flags;  // to 0 as well: they are uninitialised
  // Unless null, pinned memory that receives the slots. The number at `epoch`, in pinned memory
  // too, becomes `number` when all slots of this and of earlier launches have arrived.
  Slot* host;
  uint64_t* epoch;
  uint64_t number;
};

// A point in the work of a stream. Streams are identified by torch's ids.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  virtual void record(int64_t stream) = 0;
  // Polls a number in the host's memory, if there is one, else asks the driver.
  virtual bool has_passed() = 0;
  // Makes the host wait for it: the only sync. Throws if a polled number has not arrived then.
  virtual void wait() = 0;
  // Makes later work of `stream` wait for it; does not block the host.
  virtual void block(int64_t stream) = 0;

  // Sets the number to poll: a launch before record() writes `number` to *epoch, which outlives the
  // last has_passed() and wait().
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

// The streams of a device. All calls may throw; the work of a call that threw is not repeated.
class Streams {
 public:
  virtual ~Streams() = default;
  virtual int64_t current_stream() = 0;
  virtual int64_t default_stream() = 0;
  // True for a stream that lives as long as the process. A program may end any other.
  virtual bool is_lasting(int64_t stream) { return stream == default_stream(); }
  // True while the current stream captures a graph instead of running.
  virtual bool is_capturing() = 0;
  virtual std::unique_ptr<DeviceEvent> make_event() = 0;
  // Makes the host wait for all streams. Call without the GIL: other threads may have to queue
  // what the device waits for, such as their part of a collective.
  virtual void synchronize() = 0;
};

// A device with kernels of its own here.
class Device : public Streams {
 public:
  // Queues the scan of views[i] into slots[i], device memory, on a stream. The kinds of non-finite
  // values in it go to seen.slots[i], too.
  virtual void scan(const View* views, int64_t count, Slot* slots, int64_t stream,
                    const SeenStep& seen = {}) = 0;
  // Queues the end of a step on the current stream.
  virtual void end_step(const SlotsEnd& end) = 0;
};

}  // namespace overflow_fast
