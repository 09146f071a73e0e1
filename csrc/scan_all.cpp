#include <ATen/ATen.h>

#include <vector>

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

// Another thread that waits for the GIL keeps it for up to its switch interval (5 ms), so it is
// let go only for scans of more than about 10 us.
constexpr int64_t kReleaseGilBytes = 1 << 20;

}  // namespace

Slot scan_here(const at::Tensor& tensor, const View& view) {
  Slot slot;
  if (static_cast<int64_t>(tensor.nbytes()) < kReleaseGilBytes) {
    scan_cpu(view, slot);
  } else {
    const at::Tensor kept = tensor;  // another thread may drop it from its container meanwhile
    const py::gil_scoped_release release;
    scan_cpu(view, slot);
  }
  return slot;
}

void scan_on_devices(std::vector<ToScan>& all, bool by_torch) {
  const Unseen unseen;
  std::vector<bool> is_done(all.size());
  for (size_t first = 0; first < all.size(); ++first) {
    if (is_done[first]) continue;
    const at::Device device = all[first].tensor.device();
    std::vector<at::Tensor> tensors;
    std::vector<View> views;
    std::vector<Slot*> slots;
    for (size_t i = first; i < all.size(); ++i) {
      if (all[i].tensor.device() != device) continue;
      is_done[i] = true;
      tensors.push_back(all[i].tensor);
      views.push_back(all[i].view);
      slots.push_back(&all[i].slot);
    }
    Device* api = by_torch ? nullptr : find_device(device);
    const at::Tensor host = stats_on(device, api, tensors, views).cpu();
    const auto* found = static_cast<const Slot*>(host.const_data_ptr());
    for (size_t i = 0; i < slots.size(); ++i) *slots[i] = found[i];
  }
}

}  // namespace overflow_fast
