// The check of a device's kernels at its first use: the extension may have no code for a GPU, or a
// driver may make something else of it. Torch operations scan there then.
#pragma once

#include <c10/core/Device.h>

#include <map>
#include <string>

#include "device.h"

namespace overflow_fast {

// The device, if its kernels find in a few tensors what the CPU's find; null if torch operations
// have to scan its tensors. The first call for a device incurs a sync, and throws where a graph is
// captured or there is no memory.
Device* checked_device(c10::Device device);

// Notes that a launch of a kernel has failed, for the exception being handled.
void note_failed_launch(c10::Device device);

// The reasons why kernels that there are for a device are not used, by its name.
std::map<std::string, std::string> unused_kernels();

// Gives kernels another try that are registered again.
void forget_failed_checks(c10::DeviceType type);

}  // namespace overflow_fast
