// The devices that have kernels of their own here, by torch's device types.
#pragma once

#include <c10/core/Device.h>

#include "device.h"

namespace overflow_fast {

// Creates the device of an index; called once for each. Does not touch the hardware yet.
using OpenDevice = Device* (*)(int64_t index);

// A null `open` unregisters the kernels.
void register_device_type(c10::DeviceType type, OpenDevice open);

bool has_kernels(c10::DeviceType type);

// The device, which lives as long as the process, or null if its type has no kernels.
Device* find_device(c10::Device device);

}  // namespace overflow_fast
