// The streams of any backend, by the guard that it has registered with torch.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

namespace overflow_fast {

inline bool has_guard(c10::DeviceType type) { return c10::impl::hasDeviceGuardImpl(type); }

class BackendStreams {
 public:
  explicit BackendStreams(c10::Device device) : device_(device), guard_(device.type()) {}

  c10::Stream current() const { return guard_.getStream(device_); }
  c10::Stream default_one() const { return guard_.getDefaultStream(device_); }
  void synchronize() const { guard_.synchronizeDevice(device_.index()); }

 private:
  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
};

}  // namespace overflow_fast
