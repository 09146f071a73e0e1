// The devices that have kernels of ours, by torch's names for them.
#pragma once

#include <c10/core/Device.h>

#include "device.h"

namespace overflow_fast {

// Makes the device of an index; called once for each. Does not touch the device yet.
using OpenDevice = Device* (*)(int64_t index);

// A null `open` takes the kernels back.
void register_device_type(c10::DeviceType type, OpenDevice open);

bool has_kernels(c10::DeviceType type);

// The device, which lives as long as the process, or null if its type has no kernels.
Device* find_device(c10::Device device);

}  // namespace overflow_fast
