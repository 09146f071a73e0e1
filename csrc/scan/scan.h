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

// The elements of a readable tensor as they lie in memory, as signed integers of the width of their
// keys: expanded dimensions once, the parts of complex elements in a last dimension of 2. A view.
struct Bits {
  at::Tensor bits;
  Dtype dtype;
};
Bits bits_of(const at::Tensor& tensor);

// Them in one dimension, [n, 1] or for complex dtypes [n, 2]: a view if they lie together.
at::Tensor flat(const Bits& each);

// Elements to reduce, or what words_alone() made of them before.
struct ToReduce {
  Bits each;
  at::Tensor words;
};
at::Tensor words_alone(const Bits& each);
// True for a tensor that is small enough to be reduced together with others of its dtype and size.
bool is_joined(const at::Tensor& tensor);

// The stats of readable tensors on one device by torch operations there, as an int64 tensor of
// shape [n, 4] on it: some 14 operations for all those of one dtype and size, and 8 for the whole.
// At most one temporary of a tensor's size, and none beyond 64 MiB; does not incur a CPU-GPU sync.
at::Tensor stats_of(const std::vector<ToReduce>& all);
at::Tensor stats_composite(at::TensorList tensors);

// The stat of a readable tensor whose scan has failed: by torch operations, else by the CPU, in
// pieces that leave the device as much memory as it has. Throws where that fails, too. Incurs
// syncs.
Slot scan_anyhow(const at::Tensor& tensor);

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
