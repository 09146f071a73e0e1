// Scans of torch tensors into slots, by where the tensors live.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "layout.h"
#include "stat.h"

namespace overflow_fast {

// Combines the stat of a readable CPU view into `slot`, over torch's own thread pool.
void scan_cpu(const View& view, Slot& slot);

// The stat of a readable CPU tensor. Called with the GIL, which a large scan releases.
Slot scan_here(const at::Tensor& tensor, const View& view);

// The stats of readable tensors on one device by torch operations there, as an int64 tensor of
// shape [n, 4] on it. At most one temporary of a tensor's size, and none beyond 64 MiB; does not
// incur a CPU-GPU sync.
at::Tensor stats_composite(at::TensorList tensors);

struct ToScan {
  at::Tensor tensor;
  View view;
  Slot slot;
  std::string why;  // empty unless it could not be scanned
};

// Scans readable tensors, all those on a device together, by its kernels if it has some and
// `by_composite` does not ask for torch operations. Incurs one sync per device.
void scan_on_devices(std::vector<ToScan>& tensors, bool by_composite);

}  // namespace overflow_fast
