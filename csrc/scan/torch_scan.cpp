#include "torch_scan.h"

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "../torch_internals/errors.h"
#include "callbacks.h"
#include "scan.h"

namespace overflow_fast {

namespace py = pybind11;

namespace {

struct TorchScans {
  std::mutex mutex;
  std::map<c10::DeviceType, PyObject*> functions;  // never released
  std::map<std::pair<c10::DeviceType, at::ScalarType>, std::string> lacking;
  std::set<std::pair<c10::DeviceType, at::ScalarType>> known;  // that operations have scanned
};

TorchScans& torch_scans() {
  static auto* instance = new TorchScans;
  return *instance;
}

PyObject* function_for(c10::DeviceType type) {
  const std::lock_guard lock(torch_scans().mutex);
  const auto found = torch_scans().functions.find(type);
  return found == torch_scans().functions.end() ? nullptr : found->second;
}

std::string known_lack(const at::Tensor& tensor) {
  const std::lock_guard lock(torch_scans().mutex);
  const auto found = torch_scans().lacking.find({tensor.device().type(), tensor.scalar_type()});
  return found == torch_scans().lacking.end() ? std::string() : found->second;
}

// `slots` as unsigned minimum, unsigned maximum, sum, and sum with sign bits or-ed.
void combine_composite(const at::Tensor& slots, const at::Tensor& stats) {
  constexpr int64_t kFlip = std::numeric_limits<int64_t>::min();  // orders unsigned as signed
  const auto flipped = [](const at::Tensor& words, int64_t column) {
    return words.select(1, column).bitwise_xor(kFlip);
  };
  const at::Tensor infs = slots.select(1, 3), found = stats.select(1, 3);
  const at::Tensor signs = infs.bitwise_or(found).bitwise_and_(3);
  const at::Tensor num = infs.bitwise_and(~3) + found.bitwise_and(~3);
  slots.select(1, 0).copy_(at::minimum(flipped(slots, 0), flipped(stats, 0)).bitwise_xor_(kFlip));
  slots.select(1, 1).copy_(at::maximum(flipped(slots, 1), flipped(stats, 1)).bitwise_xor_(kFlip));
  slots.select(1, 2).add_(stats.select(1, 2));
  infs.copy_(num.bitwise_or(signs));
}

void scan_fresh(const at::Tensor& slots, int64_t first, const std::vector<at::Tensor>& tensors,
                TorchScan how) {
  const c10::DeviceType type = slots.device().type();
  if (how == TorchScan::kAuto && function_for(type) != nullptr) {
    return scan_there(slots, first, tensors, how);
  }
  slots.narrow(0, first, static_cast<int64_t>(tensors.size())).copy_(stats_composite(tensors));
  const std::lock_guard lock(torch_scans().mutex);
  for (const at::Tensor& each : tensors) torch_scans().known.insert({type, each.scalar_type()});
}

}  // namespace

bool is_known_to_scan(const at::Tensor& tensor) {
  const c10::DeviceType type = tensor.device().type();
  if (function_for(type) != nullptr) return false;
  const std::lock_guard lock(torch_scans().mutex);
  return torch_scans().known.contains({type, tensor.scalar_type()});
}

std::string remembered_failure(c10::DeviceType type, at::ScalarType dtype) {
  const py::gil_scoped_acquire gil;
  std::string text = current_exception_text().cast<std::string>();
  text = text.substr(0, text.find('\n'));
  if (text.find("out of memory") != std::string::npos) return text;
  const std::string device = c10::DeviceTypeName(type, /*lower_case=*/true);
  const std::string why = std::string(c10::toString(dtype)) + " on " + device + ": " + text;
  {
    const std::lock_guard lock(torch_scans().mutex);
    if (!torch_scans().lacking.emplace(std::make_pair(type, dtype), why).second) return why;
  }
  callbacks().warn_of_lack(why);
  return why;
}

void register_scan(c10::DeviceType type, py::object function) {
  const std::lock_guard lock(torch_scans().mutex);
  torch_scans().functions[type] = function.is_none() ? nullptr : function.release().ptr();
  std::erase_if(torch_scans().lacking,
                [&](const auto& entry) { return entry.first.first == type; });
}

void scan_there(const at::Tensor& slots, int64_t first, const std::vector<at::Tensor>& tensors,
                TorchScan how) {
  if (tensors.empty()) return;
  PyObject* function = how == TorchScan::kAuto ? function_for(slots.device().type()) : nullptr;
  if (function == nullptr) {
    const auto count = static_cast<int64_t>(tensors.size());
    return combine_composite(slots.narrow(0, first, count), stats_composite(tensors));
  }
  const py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::object>(function)(slots, first, tensors);
}

std::vector<std::string> try_scan_there(const at::Tensor& slots, int64_t first,
                                        const std::vector<at::Tensor>& tensors, TorchScan how) {
  const auto of = [&](const at::Tensor& tensor) {
    return remembered_failure(slots.device().type(), tensor.scalar_type());
  };
  std::vector<std::string> why;
  for (const at::Tensor& tensor : tensors) why.push_back(known_lack(tensor));
  for (size_t begin = 0, end = 0; begin < tensors.size(); begin = end) {
    end = begin + 1;
    if (!why[begin].empty()) continue;
    while (end < tensors.size() && why[end].empty()) ++end;
    const auto run = [&](size_t from, size_t to) {
      scan_fresh(slots, first + static_cast<int64_t>(from),
                 {tensors.begin() + static_cast<int64_t>(from),
                  tensors.begin() + static_cast<int64_t>(to)},
                 how);
    };
    try {
      run(begin, end);
      continue;
    } catch (...) {  // at one of them: the loop below finds which
      if (end == begin + 1) why[begin] = of(tensors[begin]);
    }
    for (size_t i = begin; i < end && end != begin + 1; ++i) {
      try {
        run(i, i + 1);
      } catch (...) {
        why[i] = of(tensors[i]);
      }
    }
  }
  return why;
}

}  // namespace overflow_fast
