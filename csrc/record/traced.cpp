#include "traced.h"

#include <algorithm>

namespace overflow_fast {

void Traced::remember(const Frame& frame) {
  Numbered& numbered = known_[std::this_thread::get_id()];
  size_t at = 0;
  for (const TracedCall::Item& item : frame.traced->items) {
    if (at >= frame.entries.size()) return;
    const Entry& entry = frame.entries[at];
    if (entry.listing.label != item.label) continue;  // a parameter that was left out
    if (item.is_passed && item.number >= 0)
      numbered.insert_or_assign(item.number, Known{entry, frame.sends});
    ++at;
  }
}

void Traced::end_step() {
  returned_.clear();
  if (known_.size() > kMaxThreads) known_.clear();
}

void Traced::returned(const at::Tensor& tensor) {
  returned_.push_back({weak_storage(tensor), tensor.const_data_ptr(), tensor.sizes().vec(),
                       tensor.strides().vec()});
}

bool Traced::has_returned(const at::Tensor& tensor) const {
  return std::any_of(returned_.begin(), returned_.end(), [&](const Returned& known) {
    return known.data == tensor.const_data_ptr() && tensor.sizes() == known.sizes &&
           tensor.strides() == known.strides && has_storage(tensor, known.storage);
  });
}

const Entry* Traced::find(int64_t number, int64_t num_sends) const {
  const auto numbered = known_.find(std::this_thread::get_id());
  if (numbered == known_.end()) return nullptr;
  const auto known = numbered->second.find(number);
  if (known == numbered->second.end()) return nullptr;
  const bool is_awaited = known->second.entry.slot.is_awaited();
  if (is_awaited && known->second.sends != num_sends) return nullptr;
  return &known->second.entry;
}

}  // namespace overflow_fast
