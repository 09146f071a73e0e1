// The state of TensorImpl and StorageImpl besides a tensor's values. at::Tensor offers part of it,
// through virtual calls, and no weak reference.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <cstdint>
#include <optional>

namespace overflow_fast {

// Identifies a tensor among all that are alive or weakly referenced.
using TensorId = const void*;

inline TensorId id_of(const at::TensorBase& tensor) { return tensor.unsafeGetTensorImpl(); }

// Does not keep the tensor alive, but keeps its address from being reused.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

inline WeakTensor weak_tensor(const at::TensorBase& tensor) {
  return WeakTensor(tensor.getIntrusivePtr());
}

inline bool refers_to(const WeakTensor& weak, const at::TensorBase& tensor) {
  return weak._unsafe_get_target() == tensor.unsafeGetTensorImpl();
}

// The number of in-place writes that autograd has counted; none for an inference tensor.
inline std::optional<uint32_t> version_of(const at::TensorBase& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (impl->is_inference()) return std::nullopt;
  return static_cast<uint32_t>(impl->version_counter().current_version());
}

// A tensor's counter of writes, which lives on when the tensor is gone.
class WriteCounter {
 public:
  explicit WriteCounter(const at::TensorBase& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    if (impl->is_inference()) return;
    counter_ = impl->version_counter();
    then_ = counter_.current_version();
  }
  bool is_known() const { return counter_.enabled(); }
  // True if the tensor was written to since this was created.
  bool has_moved() const { return is_known() && counter_.current_version() != then_; }

 private:
  c10::VariableVersion counter_;
  uint32_t then_ = 0;
};

// Where a tensor's memory begins; unlike data_ptr() it does not materialise a lazy copy.
inline const void* storage_data(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->storage().data();
}

// The same for the memory of tensors.
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

inline WeakStorage weak_storage(const at::TensorBase& tensor) {
  return tensor.storage().getWeakStorageImpl();
}

inline bool has_storage(const at::TensorBase& tensor, const WeakStorage& storage) {
  return storage._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl();
}

// True if the values of a tensor are not (only) in its own strided memory, by its dispatch keys.
inline bool is_wrapper(const at::TensorBase& tensor) {
  constexpr c10::DispatchKeySet kWrapper(
      {c10::DispatchKey::Python, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Functionalize,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::NestedTensor});
  const auto* impl = tensor.unsafeGetTensorImpl();
  return impl->key_set().has_any(kWrapper) || !impl->has_storage() ||
         impl->layout() != c10::kStrided || impl->is_meta() ||
         c10::isQIntType(impl->dtype().toScalarType());
}

}  // namespace overflow_fast
