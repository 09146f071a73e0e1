#include "held_scans.h"

namespace overflow_fast {

void HeldScans::begin_frame(int64_t first_slot, int64_t stream) {
  if (held_.empty()) first_slot_ = first_slot;
  stream_ = stream;
  ++num_frames_;
}

void HeldScans::add(const at::Tensor& tensor, const View& view) {
  const c10::Storage& storage = tensor.storage();
  Held held{storage, WriteCounter(tensor), storage.data(), storage.nbytes(), view, sizes_.size()};
  has_unknown_ |= !held.writes.is_known();
  sizes_.insert(sizes_.end(), view.sizes, view.sizes + view.ndim);
  sizes_.insert(sizes_.end(), view.strides, view.strides + view.ndim);
  bytes_ += held.bytes_then;
  held_.push_back(std::move(held));
}

bool HeldScans::Held::is_unchanged() const {
  if (storage.data() != memory_then || storage.nbytes() != bytes_then) return false;
  return !writes.has_moved();
}

std::vector<View> HeldScans::views() const {
  static constexpr int64_t kNothing[] = {0, 1};
  std::vector<View> views;
  for (const Held& held : held_) {
    View view = held.view;
    view.sizes = sizes_.data() + held.sizes_at;
    view.strides = view.sizes + view.ndim;
    if (!held.is_unchanged()) view = {view.data, view.dtype, kNothing, kNothing + 1, 1};
    views.push_back(view);
  }
  return views;
}

void HeldScans::clear() {
  held_.clear();
  sizes_.clear();
  num_frames_ = 0;
  bytes_ = 0;
  has_unknown_ = false;
}

}  // namespace overflow_fast
