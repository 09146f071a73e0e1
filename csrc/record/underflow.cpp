#include "underflow.h"

#include <ATen/ATen.h>

#include <limits>
#include <utility>

#include "../torch_internals/errors.h"
#include "../torch_internals/no_dispatch_guard.h"

namespace overflow_fast {

namespace {

// The keys of real floating point numbers, in integers of their own width.
at::Tensor magnitude_bits(const at::Tensor& tensor, const DtypeInfo& info) {
  switch (info.itemsize) {
    case 1: {
      const at::Tensor bits = tensor.view(at::kByte);
      const at::Tensor magnitudes = bits.bitwise_and(0x7f);
      return info.kind == KeyKind::kNegativeZeroNan ? magnitudes.masked_fill(bits.eq(0x80), 0x7f)
                                                    : magnitudes;
    }
    case 2: return tensor.view(at::kShort).bitwise_and(0x7fff);
    case 4: return tensor.view(at::kInt).bitwise_and(0x7fffffff);
    default: return tensor.view(at::kLong).bitwise_and(std::numeric_limits<int64_t>::max());
  }
}

// Where the sign bit is not set.
at::Tensor is_positive(const at::Tensor& tensor, const DtypeInfo& info) {
  switch (info.itemsize) {
    case 1: return tensor.view(at::kByte).lt(0x80);
    case 2: return tensor.view(at::kShort).ge(0);
    case 4: return tensor.view(at::kInt).ge(0);
    default: return tensor.view(at::kLong).ge(0);
  }
}

constexpr size_t kCounts = 4;  // zeros, zeros and subnormals, limits, positive ones

}  // namespace

void Underflow::add(const Place& place, Dtype dtype, const at::Tensor& tensor, Coverage& coverage) {
  const DtypeInfo& info = dtype_info(dtype);
  if (info.is_integer() || info.is_complex() || !info.has_subnormals || tensor.numel() == 0 ||
      pending_.size() >= kMaxPending) {
    return;
  }
  try {
    const NoDispatchGuard no_dispatch;
    // Compares keys, so a processor that flushes subnormals does not change the counts.
    const at::Tensor keys = magnitude_bits(tensor.detach(), info);
    const at::Tensor zeros = keys.eq(0).sum();
    const at::Tensor small = keys.lt(int64_t{1} << info.mantissa).sum();
    const at::Tensor at_limit = keys.eq(static_cast<int64_t>(info.first_nonfinite() - 1));
    const at::Tensor largest = at_limit.sum();
    const at::Tensor positive = at_limit.logical_and(is_positive(tensor.detach(), info)).sum();
    pending_.push_back(
        {{place, dtype, tensor.numel(), 0, 0}, at::stack({zeros, small, largest, positive})});
  } catch (...) {
    coverage.count(py::str("underflow not counted: ") + py::str(current_exception_text()));
  }
}

std::vector<Underflow::Counts> Underflow::take() {
  const NoDispatchGuard no_dispatch;
  std::vector<Pending> pending = std::exchange(pending_, {});
  std::vector<bool> is_done(pending.size());
  for (size_t first = 0; first < pending.size(); ++first) {
    if (is_done[first]) continue;
    const at::Device device = pending[first].on_device.device();
    std::vector<at::Tensor> there;
    std::vector<size_t> places;
    for (size_t i = first; i < pending.size(); ++i) {
      if (pending[i].on_device.device() != device) continue;
      is_done[i] = true;
      there.push_back(pending[i].on_device);
      places.push_back(i);
    }
    const at::Tensor here = at::stack(there).cpu();
    const auto* values = here.const_data_ptr<int64_t>();
    for (size_t i = 0; i < places.size(); ++i) {
      Counts& counts = pending[places[i]].counts;
      counts.num_zero = values[kCounts * i];
      counts.num_subnormal = values[kCounts * i + 1] - values[kCounts * i];
      counts.num_limit = values[kCounts * i + 2];
      counts.num_positive = values[kCounts * i + 3];
    }
  }
  std::vector<Counts> taken;
  for (const Pending& each : pending) taken.push_back(each.counts);
  return taken;
}

}  // namespace overflow_fast
