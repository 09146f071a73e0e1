#include "kernel_check.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "../torch_internals/errors.h"
#include "../torch_internals/no_dispatch_guard.h"
#include "callbacks.h"
#include "device_registry.h"
#include "scan.h"
#include "tensor_view.h"

namespace overflow_fast {

namespace py = pybind11;

namespace {

struct Checks {
  std::mutex mutex;
  std::map<Device*, std::pair<c10::Device, std::string>> known;  // why not: empty if it may be used
};

Checks& checks() {
  static auto* instance = new Checks;
  return *instance;
}

// The values of a dtype fill so many bytes: some blocks of threads, and vectors with a rest.
constexpr int64_t kBytesEach = 4096;

constexpr at::ScalarType kTorchTypes[] = {
#define OVERFLOW_FAST_TORCH_TYPE(name, torch_name, ...) at::ScalarType::torch_name,
    OVERFLOW_FAST_DTYPES(OVERFLOW_FAST_TORCH_TYPE)
#undef OVERFLOW_FAST_TORCH_TYPE
};

// For each dtype kBytesEach that hold infs and nans, where it has them, and as many that hold none.
at::Tensor bytes_to_scan() {
  const auto num_types = static_cast<int64_t>(std::size(kTorchTypes));
  at::Tensor bytes = at::empty({2 * num_types * kBytesEach}, at::kByte);
  auto* all = bytes.mutable_data_ptr<uint8_t>();
  uint32_t random = 1;
  for (int64_t i = 0; i < bytes.numel(); ++i) {
    random = random * 1664525 + 1013904223;  // of Numerical Recipes
    const bool is_finite = i / kBytesEach % 2 != 0;
    all[i] = static_cast<uint8_t>(random >> 24) & (is_finite ? 0x3f : 0xff);
  }
  for (int64_t i = 0; i < num_types; ++i) {
    const DtypeInfo& info = kDtypes[i];
    const uint64_t sign = uint64_t{1} << (8 * info.key_bytes - 1);
    const uint64_t keys[] = {info.inf_key, info.inf_key | sign, info.first_nan};
    for (int64_t j = 0; j < 3; ++j) {
      auto* at = all + 2 * i * kBytesEach + (5 + 2 * j) * info.key_bytes;
      if (keys[j] != kNoKey) std::memcpy(at, &keys[j], static_cast<size_t>(info.key_bytes));
    }
  }
  return bytes;
}

// Runs with and without a first element, elements apart, finite ones; and all bytes as one tensor.
std::vector<at::Tensor> tensors_of(const at::Tensor& bytes) {
  std::vector<at::Tensor> tensors;
  for (int64_t i = 0; i < static_cast<int64_t>(std::size(kTorchTypes)); ++i) {
    const auto part = [&](int64_t at) {
      return bytes.narrow(0, at * kBytesEach, kBytesEach).view(kTorchTypes[i]);
    };
    const at::Tensor mixed = part(2 * i);
    tensors.insert(tensors.end(), {mixed, mixed.slice(0, 1), part(2 * i + 1),
                                   mixed.view({16, -1}).slice(1, 1, std::nullopt, 3)});
  }
  tensors.push_back(bytes.view(at::kFloat));
  return tensors;
}

// Moduli are rounded differently in their last bits.
bool is_right(const Slot& found, const at::Tensor& tensor) {
  View view{};
  Slot stat;
  view_of(tensor, view);
  scan_cpu(view, stat);
  const uint64_t most = dtype_info(view.dtype).is_complex() ? 4 : 0;
  const auto is_near = [&](uint64_t a, uint64_t b) { return (a > b ? a - b : b - a) <= most; };
  return is_near(found.min_key, stat.min_key) && is_near(found.max_key, stat.max_key) &&
         found.num_nan == stat.num_nan && found.infs == stat.infs;
}

// Scans tensors in one call, and compares with the CPU's scan of the same.
bool agrees_on(Device& api, const std::vector<at::Tensor>& there,
               const std::vector<at::Tensor>& here) {
  std::vector<View> views(there.size());
  for (size_t i = 0; i < there.size(); ++i) view_of(there[i], views[i]);
  const auto count = static_cast<int64_t>(there.size());
  at::Tensor slots = at::empty({count, 4}, there.front().options().dtype(at::kLong));
  slots.zero_();
  slots.select(1, 0).fill_(-1);
  auto* first = static_cast<Slot*>(slots.mutable_data_ptr());
  api.scan(views.data(), count, first, api.current_stream());
  const at::Tensor host = slots.cpu();
  const auto* found = static_cast<const Slot*>(host.const_data_ptr());
  for (const at::Tensor& tensor : here) {
    if (!is_right(*found++, tensor)) return false;
  }
  return true;
}

// The lists are those of a few tensors, of tens, and of more: each has kernels of its own.
bool agrees(Device& api, c10::Device device) {
  const NoDispatchGuard no_dispatch;
  const c10::InferenceMode normal(false);
  const at::Tensor bytes = bytes_to_scan();
  std::vector<at::Tensor> here = tensors_of(bytes);
  std::vector<at::Tensor> there = tensors_of(bytes.to(device, false, /*copy=*/true));
  const auto few = [](const std::vector<at::Tensor>& all) {
    return std::vector<at::Tensor>(all.begin(), all.begin() + 3);
  };
  if (!agrees_on(api, few(there), few(here)) || !agrees_on(api, there, here)) return false;
  const auto twice = [](std::vector<at::Tensor> all) {
    const std::vector<at::Tensor> once = all;
    all.insert(all.end(), once.begin(), once.end());
    return all;
  };
  return agrees_on(api, twice(there), twice(here));
}

void remember(Device* api, c10::Device device, const std::string& why) {
  {
    const std::lock_guard lock(checks().mutex);
    auto& known = checks().known.try_emplace(api, device, "").first->second;
    if (why.empty() || !known.second.empty()) return;
    known.second = why;
  }
  const py::gil_scoped_acquire gil;
  callbacks().warn_of_unused_kernels(device.str(), why);
}

std::string text_of_exception() {
  const py::gil_scoped_acquire gil;
  return current_exception_text().cast<std::string>();
}

}  // namespace

Device* checked_device(c10::Device device) {
  Device* api = find_device(device);
  if (api == nullptr) return nullptr;
  const auto is_known = [&](bool& may_be_used) {
    const std::lock_guard lock(checks().mutex);
    const auto known = checks().known.find(api);
    may_be_used = known != checks().known.end() && known->second.second.empty();
    return known != checks().known.end();
  };
  bool may_be_used = false;
  if (is_known(may_be_used)) return may_be_used ? api : nullptr;
  if (api->is_capturing()) {
    throw std::runtime_error(
        "a device is first used while a graph is captured: run one forward before the capture");
  }
  std::string why;
  try {
    if (!agrees(*api, device)) why = "their results differ from the CPU's";
  } catch (const c10::OutOfMemoryError&) {
    throw;  // which says nothing of the kernels
  } catch (...) {
    why = text_of_exception();
  }
  remember(api, device, why);
  return is_known(may_be_used) && may_be_used ? api : nullptr;
}

void note_failed_launch(c10::Device device) {
  remember(find_device(device), device, text_of_exception());
}

std::map<std::string, std::string> unused_kernels() {
  const std::lock_guard lock(checks().mutex);
  std::map<std::string, std::string> unused;
  for (const auto& [_, known] : checks().known) {
    if (!known.second.empty()) unused[known.first.str()] = known.second;
  }
  return unused;
}

void forget_failed_checks(c10::DeviceType type) {
  const std::lock_guard lock(checks().mutex);
  std::erase_if(checks().known, [&](const auto& entry) {
    return entry.second.first.type() == type && !entry.second.second.empty();
  });
}

}  // namespace overflow_fast
