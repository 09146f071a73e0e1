// The operator overflow_fast::scan: its schema, its checks and its kernels per device.
#include <ATen/ATen.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/library.h>

#include "../scan/cpu/scan_cpu.h"
#include "../scan/kernel_check.h"
#include "../scan/scan.h"
#include "../scan/tensor_view.h"
#include "../scan/torch_scan.h"
#include "hook.h"

namespace overflow_fast {

namespace {

struct Task {
  void (*function)(int64_t index, void* context);
  void* context;
};

// torch's exported parallel_for: the header-only one would need this extension to be built with
// the same threading runtime as torch itself.
void run_parallel(int64_t num_tasks, void (*function)(int64_t, void*), void* context) {
  Task task{function, context};
  const auto run_range = [](int64_t begin, int64_t end, void* opaque) {
    const auto& t = *static_cast<Task*>(opaque);
    for (int64_t i = begin; i < end; ++i) t.function(i, t.context);
  };
  if (torch_parallel_for(0, num_tasks, 1, run_range, &task) != 0) {
    run_range(0, num_tasks, &task);  // a task that runs twice replaces its first result
  }
}

int num_threads() {
  uint32_t count = 1;
  torch_get_num_threads(&count);
  return static_cast<int>(count);
}

void check_arguments(const at::Tensor& slots, int64_t first, at::TensorList tensors) {
  TORCH_CHECK_TYPE(slots.scalar_type() == at::kLong, "slots must be int64, got ",
                   slots.scalar_type());
  TORCH_CHECK_VALUE(slots.dim() == 2 && slots.size(1) == 4 && slots.is_contiguous(),
                    "slots must be contiguous and of shape [n, 4], got shape ", slots.sizes(),
                    " with strides ", slots.strides());
  const auto count = static_cast<int64_t>(tensors.size());
  TORCH_CHECK_INDEX(first >= 0 && first + count <= slots.size(0), "first must leave room for ",
                    count, " slots: first=", first, ", slots has ", slots.size(0));
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.device() == slots.device(), "tensors must be on the device of slots (",
                      slots.device(), "), got ", tensor.device());
  }
}

View readable_view(const at::Tensor& tensor) {
  View view{};
  TORCH_CHECK_TYPE(view_of(tensor, view) == Readability::kReadable,
                   "tensors must be strided and of a dtype that can be scanned, got ",
                   tensor.toString());
  return view;
}

void scan_op_cpu(const at::Tensor& slots, int64_t first, at::TensorList tensors) {
  check_arguments(slots, first, tensors);
  auto* slot = static_cast<Slot*>(slots.mutable_data_ptr()) + first;
  for (const at::Tensor& tensor : tensors) scan_cpu(readable_view(tensor), *slot++);
}

void scan_op_torch(const at::Tensor& slots, int64_t first, at::TensorList tensors, TorchScan how) {
  check_arguments(slots, first, tensors);
  std::vector<at::Tensor> values;
  for (const at::Tensor& tensor : tensors) {
    readable_view(tensor);
    values.push_back(tensor.detach());
  }
  scan_there(slots, first, values, how);
}

void scan_op_composite(const at::Tensor& slots, int64_t first, at::TensorList tensors) {
  scan_op_torch(slots, first, tensors, TorchScan::kComposite);
}

// With the kernels of the device, where there are some; does not synchronise.
void scan_op_device(const at::Tensor& slots, int64_t first, at::TensorList tensors) {
  Device* device = checked_device(slots.device());
  if (device == nullptr) return scan_op_torch(slots, first, tensors, TorchScan::kAuto);
  check_arguments(slots, first, tensors);
  std::vector<View> views;
  for (const at::Tensor& tensor : tensors) views.push_back(readable_view(tensor));
  device->scan(views.data(), static_cast<int64_t>(views.size()),
               static_cast<Slot*>(slots.mutable_data_ptr()) + first, device->current_stream());
}

void frame_op(const at::Tensor& handle_tensor, int64_t id, c10::string_view text,
              at::TensorList tensors) {
  record_traced(handle_tensor, id, text, tensors);
}

void call_op(const at::Tensor& handle_tensor, c10::string_view method) {
  call_traced(handle_tensor, std::string(method));
}

}  // namespace

void scan_cpu(const View& view, Slot& slot) {
  cpu::scan(view, {num_threads(), run_parallel}, slot);
}

TORCH_LIBRARY(overflow_fast, m) {
  // Combines the stat of tensors[i] into slots[first + i]; the caller resets the slots.
  m.def("scan(Tensor(a!) slots, int first, Tensor[] tensors) -> ()");
  // The same by torch operations alone, on any device.
  m.def("scan_composite(Tensor(a!) slots, int first, Tensor[] tensors) -> ()");
  // Runs in compiled code in place of a module's hook: see traced.h.
  m.def("frame(Tensor handle_tensor, int id, str text, Tensor[] tensors) -> ()");
  // The same without an effect registered in torch, for graphs that cannot contain effects.
  m.def("plain_frame(Tensor handle_tensor, int id, str text, Tensor[] tensors) -> ()");
  m.def("plain_call(Tensor handle_tensor, str method) -> ()", {at::Tag::cudagraph_unsafe});
  // Calls a method of the hook's owner. A CUDA graph cannot replay that.
  m.def("call(Tensor handle_tensor, str method) -> ()", {at::Tag::cudagraph_unsafe});
}

TORCH_LIBRARY_IMPL(overflow_fast, CPU, m) { m.impl("scan", scan_op_cpu); }

TORCH_LIBRARY_IMPL(overflow_fast, CompositeExplicitAutograd, m) {
  m.impl("scan", scan_op_device);
  m.impl("scan_composite", scan_op_composite);
  m.impl("frame", frame_op);
  m.impl("call", call_op);
  m.impl("plain_frame", frame_op);
  m.impl("plain_call", call_op);
}

TORCH_LIBRARY_IMPL(overflow_fast, Meta, m) {
  m.impl("scan", [](const at::Tensor&, int64_t, at::TensorList) {});
  m.impl("scan_composite", [](const at::Tensor&, int64_t, at::TensorList) {});
  m.impl("frame", [](const at::Tensor&, int64_t, c10::string_view, at::TensorList) {});
  m.impl("call", [](const at::Tensor&, c10::string_view) {});
  m.impl("plain_frame", [](const at::Tensor&, int64_t, c10::string_view, at::TensorList) {});
  m.impl("plain_call", [](const at::Tensor&, c10::string_view) {});
}

// A stat has no gradient: the scan reads the values and does not change autograd's graph.
TORCH_LIBRARY_IMPL(overflow_fast, Autograd, m) {
  m.impl("scan", torch::CppFunction::makeFallthrough());
  m.impl("scan_composite", torch::CppFunction::makeFallthrough());
  m.impl("frame", torch::CppFunction::makeFallthrough());
  m.impl("call", torch::CppFunction::makeFallthrough());
  m.impl("plain_frame", torch::CppFunction::makeFallthrough());
  m.impl("plain_call", torch::CppFunction::makeFallthrough());
}

}  // namespace overflow_fast
