#include "tensor_view.h"

#include "../torch_internals/tensor_state.h"

namespace overflow_fast {

std::optional<Dtype> to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return Dtype::kFloat64;
    case at::kFloat: return Dtype::kFloat32;
    case at::kHalf: return Dtype::kFloat16;
    case at::kBFloat16: return Dtype::kBFloat16;
    case at::kFloat8_e4m3fn: return Dtype::kFloat8E4M3FN;
    case at::kFloat8_e5m2: return Dtype::kFloat8E5M2;
    case at::kFloat8_e4m3fnuz: return Dtype::kFloat8E4M3FNUZ;
    case at::kFloat8_e5m2fnuz: return Dtype::kFloat8E5M2FNUZ;
    case at::kFloat8_e8m0fnu: return Dtype::kFloat8E8M0FNU;
    case at::kComplexDouble: return Dtype::kComplex128;
    case at::kComplexFloat: return Dtype::kComplex64;
    case at::kComplexHalf: return Dtype::kComplex32;
    case at::kLong: return Dtype::kInt64;
    case at::kInt: return Dtype::kInt32;
    case at::kShort: return Dtype::kInt16;
    case at::kChar: return Dtype::kInt8;
    case at::kUInt64: return Dtype::kUInt64;
    case at::kUInt32: return Dtype::kUInt32;
    case at::kUInt16: return Dtype::kUInt16;
    case at::kByte: return Dtype::kUInt8;
    case at::kBool: return Dtype::kBool;
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
