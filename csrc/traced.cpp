#include "traced.h"

#include <algorithm>

namespace overflow_fast {

namespace {

// From the dict that overflow_fast.traced_graph.parse makes of the text.
TracedCall::Item item_of(const py::dict& parsed, LabelTable& labels) {
  TracedCall::Item item{};
  const auto role = parsed["role"].cast<Role>();
  item.is_named = role != Role::kInput && role != Role::kOutput;
  LabelId label = role == Role::kInput ? kInputLabel : kOutputLabel;
  for (const py::handle each : parsed["path"]) {
    const auto& part = each.cast<const LabelPart&>();
    if (part.style == LabelStyle::kName) {
      if (item.is_named) label = labels.name(part.value.ptr());
    } else if (part.style == LabelStyle::kIndex) {
      label = labels.index(label, part.value.cast<int64_t>());
    } else {
      label = labels.key(label, part.style, part.value.ptr());
    }
  }
  item.listing = {label, parsed["only_if_bad"].cast<bool>(), parsed["allowed"].cast<uint64_t>()};
  item.kind = parsed["kind"].cast<EntryKind>();
  item.why = parsed["why"];
  item.number = parsed["number"].cast<int64_t>();
  item.is_new = parsed["is_new"].cast<bool>();
  item.is_returned = parsed["is_returned"].cast<bool>();
  return item;
}

}  // namespace

const TracedCall& Traced::call_of(const std::string& text, LabelTable& labels) {
  const auto found = calls_.find(text);
  if (found != calls_.end()) return found->second;
  const py::dict parsed = py::module_::import("overflow_fast.traced_graph").attr("parse")(text);
  TracedCall call{parsed["phase"].cast<Phase>(),   parsed["class_name"],
                  parsed["is_root"].cast<bool>(),  parsed["has_frame"].cast<bool>(),
                  parsed["has_loss"].cast<bool>(), {}};
  for (const auto& item : parsed["items"]) {
    call.items.push_back(item_of(py::reinterpret_borrow<py::dict>(item), labels));
  }
  return calls_.emplace(text, std::move(call)).first->second;
}

void Traced::remember(const Frame& frame) {
  Numbered& numbered = known_[std::this_thread::get_id()];
  size_t at = 0;
  for (const TracedCall::Item& item : frame.traced->items) {
    if (at >= frame.entries.size()) return;
    const Entry& entry = frame.entries[at];
    if (entry.listing.label != item.listing.label) continue;  // a parameter that was left out
    if (item.is_new && item.number >= 0)
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
  const bool is_on_device = known->second.entry.slot.is_on_device();
  if (is_on_device && known->second.sends != num_sends) return nullptr;
  return &known->second.entry;
}

}  // namespace overflow_fast
