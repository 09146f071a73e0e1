// Scans of torch tensors into slots, by where the tensors live.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "layout.h"
#include "stat.h"

namespace overflow_fast {

// Combines the stat of a readable CPU view into `slot`, over torch's own thread pool.
void scan_cpu(const View& view, Slot& slot);

// The stat of a readable CPU tensor. Called with the GIL, which a large scan lets go.
Slot scan_here(const at::Tensor& tensor, const View& view);

// The stat of any readable tensor by torch operations on its own device, as a [4] int64 tensor
// there. Allocates temporaries of the tensor's size; does not incur a CPU-GPU sync.
at::Tensor stat_composite(const at::Tensor& tensor);

struct ToScan {
  at::Tensor tensor;
  View view;
  Slot slot;
};

// Scans readable tensors, all those on a device together, by its kernels if it has some and
// `by_torch` does not ask for torch operations. Incurs one sync per device.
void scan_on_devices(std::vector<ToScan>& tensors, bool by_torch);

}  // namespace overflow_fast
