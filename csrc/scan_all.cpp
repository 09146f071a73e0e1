#include <ATen/ATen.h>

#include <algorithm>

#include "device_registry.h"
#include "device_slots.h"
#include "scan.h"
#include "unseen.h"

namespace overflow_fast {

namespace {

// The stats of some tensors on one device, as a [n, 4] int64 tensor there.
at::Tensor stats_on(at::Device device, Device* api, const std::vector<at::Tensor>& tensors,
                    const std::vector<View>& views) {
  if (api == nullptr) {
    std::vector<at::Tensor> stats;
    for (const at::Tensor& tensor : tensors) stats.push_back(stat_composite(tensor.detach()));
    return at::stack(stats);
  }
  const auto count = static_cast<int64_t>(views.size());
  at::Tensor slots = at::empty({count, 4}, at::TensorOptions().dtype(at::kLong).device(device));
  reset_slots(slots);
  api->scan(views.data(), count, static_cast<Slot*>(slots.mutable_data_ptr()));
  return slots;
}

}  // namespace

void scan_all(const std::vector<at::Tensor>& tensors, const std::vector<View>& views,
              const std::vector<Readability>& readable, ScanBackend backend,
              std::vector<Slot>& slots) {
  const Unseen unseen;
  std::vector<bool> is_done(tensors.size());
  for (size_t first = 0; first < tensors.size(); ++first) {
    if (is_done[first] || readable[first] != Readability::kReadable) continue;
    const at::Device device = tensors[first].device();
    if (device.is_cpu() && backend == ScanBackend::kAuto) {
      scan_cpu(views[first], slots[first]);
      continue;
    }
    std::vector<at::Tensor> group;
    std::vector<View> group_views;
    std::vector<size_t> members;
    for (size_t i = first; i < tensors.size(); ++i) {
      if (readable[i] != Readability::kReadable || tensors[i].device() != device) continue;
      is_done[i] = true;
      group.push_back(tensors[i]);
      group_views.push_back(views[i]);
      members.push_back(i);
    }
    Device* api = backend == ScanBackend::kComposite ? nullptr : find_device(device);
    const at::Tensor host = stats_on(device, api, group, group_views).cpu();
    const auto* words = static_cast<const Slot*>(host.const_data_ptr());
    for (size_t i = 0; i < members.size(); ++i) slots[members[i]] = words[i];
  }
}

}  // namespace overflow_fast
