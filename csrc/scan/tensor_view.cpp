#include "tensor_view.h"

#include "../torch_internals/tensor_state.h"

namespace overflow_fast {

std::optional<Dtype> to_dtype(at::ScalarType type) {
  switch (type) {
#define OVERFLOW_FAST_CASE(name, torch_name, ...) \
  case at::ScalarType::torch_name: return Dtype::name;
    OVERFLOW_FAST_DTYPES(OVERFLOW_FAST_CASE)
#undef OVERFLOW_FAST_CASE
    default: return std::nullopt;
  }
}

namespace {

// Elements from the first to the last that the strides reach, both included.
int64_t span(const at::TensorBase& tensor) {
  if (tensor.is_contiguous()) return tensor.numel();
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return last + 1;
}

}  // namespace

Readability view_of(const at::Tensor& tensor, View& view) {
  if (!tensor.defined() || is_wrapper(tensor)) return Readability::kWrapper;
  const auto dtype = to_dtype(tensor.scalar_type());
  if (!dtype) return Readability::kUnsupported;
  const c10::Storage& storage = tensor.storage();
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  if (tensor.numel() != 0) {
    const int64_t end = (tensor.storage_offset() + span(tensor)) * itemsize;
    if (storage.data() == nullptr || static_cast<int64_t>(storage.nbytes()) < end) {
      return Readability::kFreed;
    }
  }
  const auto* base = static_cast<const char*>(storage.data());
  view = View{base == nullptr ? nullptr : base + tensor.storage_offset() * itemsize, *dtype,
              tensor.sizes().data(), tensor.strides().data(), tensor.dim()};
  return Readability::kReadable;
}

}  // namespace overflow_fast
