// Tensors that were scanned before in this step. A tensor is recognised by its identity, its
// version counter, its address and its layout; a weak reference keeps its identity from being
// reused. Writes that do not change the version counter (.data, numpy, fused optimizers) cannot be
// detected, so a memo never outlives a step.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../scan/dtype.h"
#include "../torch_internals/tensor_state.h"
#include "slot_ref.h"

namespace overflow_fast {

class Memo {
 public:
  // The state of a tensor at this moment. Valid while the tensor lives.
  struct Key {
    TensorId id;
    const void* data;
    int64_t numel;
    uint64_t layout;
    uint32_t version;
    bool is_inference;

    static Key of(const at::Tensor& tensor) {
      const std::optional<uint32_t> version = version_of(tensor);
      return {id_of(tensor),     storage_data(tensor), tensor.numel(),
              layout_of(tensor), version.value_or(0),  !version};
    }
    bool operator==(const Key& other) const {
      return id == other.id && version == other.version && data == other.data &&
             numel == other.numel && layout == other.layout;
    }
  };

  struct Known {
    SlotRef slot;
    Dtype dtype;
    int64_t frame;  // the order of the frame that scanned it
  };

  // The result of an earlier scan of a tensor, or null. An inference tensor has no version counter,
  // so it is recognised only within the frame that scanned it, which began at `frame_start`.
  const Known* find(const at::Tensor& tensor, size_t frame_start) const {
    if (table_.empty()) return nullptr;
    const TensorId id = id_of(tensor);
    for (size_t at = place(id);; at = (at + 1) & (table_.size() - 1)) {
      if (table_[at] == 0) return nullptr;
      const Entry& entry = entries_[table_[at] - 1];
      if (entry.key.id != id) continue;
      const bool is_fresh = !entry.key.is_inference || entry.frame_mark >= frame_start;
      return is_fresh && entry.key == Key::of(tensor) ? &entry.known : nullptr;
    }
  }

  void insert(const at::Tensor& tensor, const Key& key, Known known, size_t frame_mark) {
    if ((entries_.size() + 1) * 2 > table_.size()) grow();
    size_t at = place(key.id);
    for (; table_[at] != 0; at = (at + 1) & (table_.size() - 1)) {
      Entry& entry = entries_[table_[at] - 1];
      if (entry.key.id != key.id) continue;
      entry.key = key;
      entry.known = known;
      entry.frame_mark = frame_mark;
      return;
    }
    entries_.push_back({key, known, frame_mark, weak_tensor(tensor)});
    table_[at] = static_cast<uint32_t>(entries_.size());
  }

  // The tensor that a frame scanned into a slot; undefined if it is gone. Looks through all.
  at::Tensor tensor_of(SlotRef slot, int64_t frame) const {
    for (const Entry& entry : entries_) {
      const Known& known = entry.known;
      if (!known.slot.is_on_host() || known.slot.index != slot.index) continue;
      if (known.frame != frame) continue;  // of another thread, which has begun a step since
      return at::Tensor(entry.alive.lock());
    }
    return {};
  }

  void clear() {
    if (entries_.empty()) return;
    entries_.clear();
    std::fill(table_.begin(), table_.end(), 0);
  }

 private:
  struct Entry {
    Key key;
    Known known;
    size_t frame_mark;
    WeakTensor alive;
  };

  static uint64_t layout_of(const at::Tensor& tensor) {
    uint64_t hash = static_cast<uint64_t>(tensor.scalar_type());
    hash = hash * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(tensor.storage_offset());
    if (tensor.is_contiguous()) return hash;
    for (const int64_t part : tensor.sizes()) hash = (hash ^ part) * 0x9e3779b97f4a7c15 + 1;
    for (const int64_t part : tensor.strides()) hash = (hash ^ part) * 0x9e3779b97f4a7c15 + 2;
    return hash;
  }

  size_t place(TensorId id) const {
    const auto bits = reinterpret_cast<uintptr_t>(id) * 0x9e3779b97f4a7c15;
    return (bits >> 32) & (table_.size() - 1);
  }

  void grow() {
    table_.assign(std::max<size_t>(256, table_.size() * 2), 0);
    for (size_t i = 0; i < entries_.size(); ++i) {
      size_t at = place(entries_[i].key.id);
      while (table_[at] != 0) at = (at + 1) & (table_.size() - 1);
      table_[at] = static_cast<uint32_t>(i + 1);
    }
  }

  std::vector<Entry> entries_;
  std::vector<uint32_t> table_;  // open addressing: index into entries_ + 1, 0 where free
};

}  // namespace overflow_fast
