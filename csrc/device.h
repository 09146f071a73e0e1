// What the recorder needs of a device that has kernels of ours, free of torch. CUDA's stands in
// cuda/; for a device without one see torch_scan.h.
#pragma once

#include <cstdint>
#include <memory>

#include "layout.h"
#include "stat.h"

namespace overflow_fast {

// A point in the work of a stream. Streams are known by torch's ids.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  virtual void record(int64_t stream) = 0;
  virtual bool has_passed() = 0;
  // The host waits for it: the one sync there is.
  virtual void wait() = 0;
  // What `stream` is given from now on waits for it; the host does not.
  virtual void hold_up(int64_t stream) = 0;
};

// All calls may throw; what a call that threw was to do is left undone.
class Device {
 public:
  virtual ~Device() = default;
  // Queues the scan of views[i] into slots[i], device memory, on the current stream.
  virtual void scan(const View* views, int64_t count, Slot* slots) = 0;
  virtual int64_t current_stream() = 0;
  // Whether the current stream records a graph instead of running.
  virtual bool is_capturing() = 0;
  virtual std::unique_ptr<DeviceEvent> make_event() = 0;
  // The host waits for all streams.
  virtual void synchronize() = 0;
};

}  // namespace overflow_fast
