#include "rules.h"

#include "../torch_internals/eval_frame.h"
#include "../torch_internals/hidden.h"
#include "records.h"

namespace overflow_fast {

void Rules::apply(Frame& frame, const LabelTable& labels, bool to_all) {
  bool is_bad = false;
  for (Entry& entry : frame.entries) {
    if (entry.kind != EntryKind::kTensor) continue;
    if (to_all || entry.is_bad()) {
      entry.listing.allowed |= allowed_at(frame, entry.listing, labels);
    }
    is_bad |= entry.is_bad();
  }
  frame.is_bad = is_bad;
}

uint64_t Rules::allowed_at(const Frame& frame, const Listing& listing, const LabelTable& labels) {
  const Place place{frame.kind, frame.module, listing.label};
  const auto found = known_.find(place);
  if (found != known_.end()) return found->second;
  const EvalFramePause pause;
  const Hidden hidden;
  const auto allowed = function_(named(labels, place, listing.role)).cast<uint64_t>();
  if (known_.size() < kMaxPlaces) known_.emplace(place, allowed);
  return allowed;
}

}  // namespace overflow_fast
