// Scans of torch tensors into slots, by where the tensors live.
#pragma once

#include <ATen/core/Tensor.h>

#include "layout.h"
#include "stat.h"

namespace overflow_fast {

// Combines the stat of a readable CPU view into `slot`, over torch's own thread pool.
void scan_cpu(const View& view, Slot& slot);

// The stat of any readable tensor by torch operations on its own device, as a [4] int64 tensor
// there. Allocates temporaries of the tensor's size; does not incur a CPU-GPU sync.
at::Tensor stat_composite(const at::Tensor& tensor);

}  // namespace overflow_fast
