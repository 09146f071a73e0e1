// The streams and events of a device without an implementation of `Device`, by torch's own
// interface for any backend: XPU, and whatever registers itself as PrivateUse1.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "device.h"

namespace overflow_fast {

// Null for devices without streams and events, and for MPS, which has one stream.
std::unique_ptr<Streams> torch_streams(c10::Device device);

}  // namespace overflow_fast
