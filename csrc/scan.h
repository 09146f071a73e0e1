// Scans of torch tensors into slots, by where the tensors live.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "layout.h"
#include "stat.h"
#include "tensor_view.h"

namespace overflow_fast {

// Combines the stat of a readable CPU view into `slot`, over torch's own thread pool.
void scan_cpu(const View& view, Slot& slot);

// The stat of any readable tensor by torch operations on its own device, as a [4] int64 tensor
// there. Allocates temporaries of the tensor's size; does not incur a CPU-GPU sync.
at::Tensor stat_composite(const at::Tensor& tensor);

enum class ScanBackend : uint8_t {
  kAuto,       // the kernels of the tensor's device, else torch operations
  kComposite,  // torch operations
  kDevice,     // the kernels registered for the tensor's device, also for the CPU
};

// Scans each readable tensor into its slot. Tensors on a device are scanned together and incur
// one sync per device.
void scan_all(const std::vector<at::Tensor>& tensors, const std::vector<View>& views,
              const std::vector<Readability>& readable, ScanBackend backend,
              std::vector<Slot>& slots);

}  // namespace overflow_fast
