#include <ATen/ATen.h>

#include <vector>

#include "../scan/kernel_check.h"
#include "../scan/scan.h"
#include "../scan/torch_scan.h"
#include "../torch_internals/no_dispatch_guard.h"
#include "device_slots.h"

namespace overflow_fast {

namespace {

// Tensors on one device.
struct Group {
  std::vector<ToScan*> members;
  std::vector<at::Tensor> tensors;
  std::vector<View> views;

  void add(ToScan& one) {
    members.push_back(&one);
    tensors.push_back(one.tensor.detach());
    views.push_back(one.view);
  }
};

void scan_group(at::Device device, Group& group, bool by_composite) {
  const auto count = static_cast<int64_t>(group.members.size());
  at::Tensor slots = at::empty({count, 4}, at::TensorOptions().dtype(at::kLong).device(device));
  reset_slots(slots);
  Device* api = by_composite ? nullptr : checked_device(device);
  bool is_done = api != nullptr;
  try {
    if (is_done) {
      api->scan(group.views.data(), count, static_cast<Slot*>(slots.mutable_data_ptr()),
                api->current_stream());
    }
  } catch (...) {
    note_failed_launch(device);
    is_done = false;
  }
  if (!is_done) {
    const TorchScan how = by_composite ? TorchScan::kComposite : TorchScan::kAuto;
    const std::vector<std::string> why = try_scan_there(slots, 0, group.tensors, how);
    for (size_t i = 0; i < why.size(); ++i) group.members[i]->why = why[i];
  }
  const at::Tensor host = slots.cpu();
  const auto* found = static_cast<const Slot*>(host.const_data_ptr());
  for (ToScan* one : group.members) one->slot = *found++;
}

// Another thread that gets the GIL may keep it for its switch interval (5 ms), so only scans of
// more than about 10 us release it.
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

void scan_on_devices(std::vector<ToScan>& all, bool by_composite) {
  const NoDispatchGuard no_dispatch;
  std::vector<bool> is_done(all.size());
  for (size_t first = 0; first < all.size(); ++first) {
    if (is_done[first]) continue;
    const at::Device device = all[first].tensor.device();
    Group group;
    for (size_t i = first; i < all.size(); ++i) {
      if (all[i].tensor.device() != device) continue;
      is_done[i] = true;
      group.add(all[i]);
    }
    scan_group(device, group, by_composite);
  }
}

}  // namespace overflow_fast
