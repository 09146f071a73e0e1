#include "recorder.h"

#include <algorithm>

#include "../scan/callbacks.h"
#include "../scan/scan.h"
#include "../scan/tensor_view.h"
#include "../torch_internals/autograd_graph.h"
#include "../torch_internals/errors.h"
#include "../torch_internals/python_tensor.h"
#include "traced_text.h"

namespace overflow_fast {

namespace {

// Notes the version and the autograd node of an input, from which its origin is later derived.
void note_input(Frame& frame, Listing& listing, const at::Tensor& tensor) {
  listing.version = version_of(tensor).value_or(1);
  const std::optional<NodeId> node = node_of(tensor);
  if (!node) return;
  listing.is_computed = true;
  if (node->thread == graph_thread()) {
    listing.node = node->number + 1;
    frame.newest_input = std::max(frame.newest_input, listing.node);
  }
}

py::object reason_for(const at::Tensor& tensor, Readability readability) {
  return callbacks().reason(to_python(tensor), readability);
}

}  // namespace

Recorder::Recorder(std::optional<int64_t> max_frames, Options options)
    : max_frames(max_frames), lists_parameters(options.lists_parameters), options_(options) {}

Recorder::~Recorder() { sink_->recorder = nullptr; }

const Recorder::Course& Recorder::course() const {
  if (apart_.empty()) return shared_;  // nearly always
  const auto found = std::ranges::find(apart_, PyThread_get_thread_ident(), &Course::thread);
  return found == apart_.end() ? shared_ : *found;
}

void Recorder::end_apart() {
  std::erase_if(
      apart_, [id = PyThread_get_thread_ident()](const Course& each) { return each.thread == id; });
}

void Recorder::leave_out(const std::vector<unsigned long>& threads) {
  for (const unsigned long thread : threads) {
    auto found = std::ranges::find(apart_, thread, &Course::thread);
    if (found == apart_.end()) found = apart_.insert(apart_.end(), {thread, -1});
    found->is_left_out = true;
  }
}

Frame Recorder::begin_frame(uint32_t module, py::object class_name, FrameKind kind) {
  ++total_calls;
  ++frame_mark_;
  // Backward belongs to the batch whose forward is over.
  const bool is_forward = kind == FrameKind::kForward;
  Course& own = course();
  Frame frame{module,
              std::move(class_name),
              is_forward ? own.batch : last_batch(),
              own.opens_batch && is_forward,
              kind,
              ++num_frames_};
  deferred_.begin(frame);
  frame.entries = std::move(spare_);
  frame.entries.clear();
  frame.unscanned = std::move(spare_unscanned_);
  own.opens_batch &= !is_forward;
  return frame;
}

void Recorder::add_none(Frame& frame, Listing listing) {
  listing.role = role_of(frame.kind, listing.label);
  frame.entries.push_back({{}, {}, {}, 0, listing, EntryKind::kNone, {}});
}

void Recorder::add_not_tensor(Frame& frame, Listing listing) {
  listing.role = role_of(frame.kind, listing.label);
  frame.entries.push_back({{}, {}, {}, 0, listing, EntryKind::kNotTensor, {}});
}

void Recorder::add_not_scanned(Frame& frame, Listing listing, py::object why) {
  listing.role = role_of(frame.kind, listing.label);
  frame.entries.push_back({{}, {}, {}, 0, listing, EntryKind::kTensor, {}});
  coverage_.give_up(frame.entries.back(), std::move(why));
}

void Recorder::add_tensor(Frame& frame, Listing listing, const at::Tensor& tensor) {
  ++coverage_.tensors_listed;
  listing.role = role_of(frame.kind, listing.label);
  if (listing.role == Role::kInput && options_.step_mode) note_input(frame, listing, tensor);
  try {
    if (uses_memo(frame)) {
      const Memo::Known* known = memo_.find(tensor, frame_mark_);
      if (known != nullptr && !deferred_.is_outdated(known->slot, frame_mark_)) {
        return add_stat(frame, listing, tensor, *known);
      }
    }
    View view{};
    const Readability readability = view_of(tensor, view);
    if (readability == Readability::kReadable) return add_scanned(frame, listing, tensor, view);
    if (readability != Readability::kWrapper) {
      return add_not_scanned(frame, listing, reason_for(tensor, readability));
    }
    add_wrapper(frame, listing, tensor);
  } catch (...) {
    add_not_scanned(frame, listing, current_exception_text());
  }
}

void Recorder::add_wrapper(Frame& frame, Listing listing, const at::Tensor& tensor) {
  const py::object values = callbacks().resolve(to_python(tensor));
  if (!is_tensor(values.ptr())) return add_not_scanned(frame, listing, values);
  const at::Tensor& inner = tensor_of(values.ptr());
  View view{};
  const Readability readability = view_of(inner, view);
  if (readability == Readability::kReadable) return add_scanned(frame, listing, inner, view);
  add_not_scanned(frame, listing, reason_for(inner, readability));
}

void Recorder::add_scanned(Frame& frame, Listing listing, const at::Tensor& tensor,
                           const View& view) {
  if (is_here(tensor) && may_arrive(frame, listing.role, tensor)) {
    return add_pinned(frame, listing, tensor, view);
  }
  if (listing.role != Role::kInput && !deferred_.is_capturing()) {
    const Place place{frame.kind, frame.module, listing.label};
    if (headroom_.wants_count(place) || counts_underflow) {
      underflow_.add(place, view.dtype, tensor, coverage_);
    }
  }
  if (!is_here(tensor)) return add_unscanned(frame, listing, tensor, view);
  const size_t mark = frame_mark_;
  const bool is_brief = static_cast<int64_t>(tensor.nbytes()) < kMinMemoBytes;
  std::optional<Memo::Key> key;
  // Taken before the scan: a write that another thread makes meanwhile must not be missed later.
  if (uses_memo(frame) && !is_brief) key = Memo::Key::of(tensor);
  const Memo::Known known{scan_to_slot(tensor, view), view.dtype, frame.order};
  if (key) memo_.insert(tensor, *key, known, mark);
  add_stat(frame, listing, tensor, known);
}

void Recorder::add_pinned(Frame& frame, Listing listing, const at::Tensor& tensor,
                          const View& view) {
  if (deferred_.is_capturing()) {
    return add_not_scanned(frame, listing, py::str("pinned memory, while a graph is captured"));
  }
  const Memo::Known known{deferred_.add_pinned(tensor), view.dtype, frame.order};
  if (uses_memo(frame)) memo_.insert(tensor, Memo::Key::of(tensor), known, frame_mark_);
  add_stat(frame, listing, tensor, known);
}

// Scans a tensor once, also if the frame lists it several times.
void Recorder::add_unscanned(Frame& frame, Listing listing, const at::Tensor& tensor,
                             const View& view) {
  size_t at = 0;
  while (at < frame.unscanned.size() && !frame.unscanned[at].tensor.is_same(tensor)) ++at;
  if (at == frame.unscanned.size()) frame.unscanned.push_back({tensor, view});
  frame.unscanned[at].is_output |= listing.role == Role::kOutput;
  frame.entries.push_back({{},
                           {SlotRef::Kind::kUnscanned, 0, static_cast<uint32_t>(at)},
                           {},
                           tensor.numel(),
                           listing,
                           EntryKind::kTensor,
                           view.dtype});
  frame.waits = true;
}

void Recorder::add_stat(Frame& frame, Listing listing, const at::Tensor& tensor,
                        Memo::Known known) {
  const bool is_here = known.slot.is_on_host();
  const bool is_before = known.frame != frame.order && known.slot.kind != SlotRef::Kind::kPinned;
  frame.entries.push_back({is_here ? host_slots_[known.slot.index] : Slot{},
                           known.slot,
                           {},
                           tensor.numel(),
                           listing,
                           EntryKind::kTensor,
                           known.dtype,
                           is_before ? known.frame : 0});
  frame.is_bad |= frame.entries.back().is_bad();
  frame.waits |= !is_here;
}

// Scans again what a bad frame on the host was only remembered of: writes that torch does not count
// (a NumPy array, a kernel of another library) may have come between. Clean frames cost nothing.
void Recorder::scan_remembered(Frame& frame) {
  for (Entry& entry : frame.entries) {
    if (entry.seen_in == 0 || !entry.slot.is_on_host() || entry.is_bad()) continue;
    const at::Tensor tensor = memo_.tensor_of(entry.slot, entry.seen_in);
    View view{};
    if (!tensor.defined() || view_of(tensor, view) != Readability::kReadable) continue;
    const Memo::Key key = Memo::Key::of(tensor);
    const Memo::Known known{scan_to_slot(tensor, view), view.dtype, frame.order};
    memo_.insert(tensor, key, known, frame_mark_);
    entry.slot = known.slot;
    entry.stat = host_slots_[known.slot.index];
    entry.is_rewritten = entry.is_bad();
    if (!entry.is_rewritten) entry.seen_in = 0;
  }
}

SlotRef Recorder::scan_to_slot(const at::Tensor& tensor, const View& view) {
  coverage_.scanned(tensor);
  host_slots_.push_back(scan_here(tensor, view));
  return {SlotRef::Kind::kHost, 0, static_cast<uint32_t>(host_slots_.size() - 1)};
}

const TracedCall& Recorder::traced_call(int64_t id, std::string_view text) {
  if (const TracedCall* known = traced_.find_call(id)) return *known;
  TracedCall call = parse_traced(text, labels_);
  std::erase_if(call.items, [this](const TracedCall::Item& item) {
    const bool is_tensor = item.kind == EntryKind::kTensor || item.kind == EntryKind::kNotScanned;
    return !is_tensor && listing(item.part, item.label).only_if_bad;
  });
  return traced_.add_call(id, std::move(call));
}

void Recorder::add_traced(Frame& frame, const TracedCall& call, at::TensorList tensors) {
  frame.traced = &call;
  for (const py::object& type : call.opaque) note_opaque(frame, type);
  size_t next = 0;
  std::vector<std::pair<int64_t, size_t>> here;  // numbers and places of this frame's tensors
  for (const TracedCall::Item& item : call.items) {
    const Listing listing = this->listing(item.part, item.label);
    if (item.kind == EntryKind::kNone) {
      add_none(frame, listing);
    } else if (item.kind == EntryKind::kNotTensor) {
      add_not_tensor(frame, listing);
    } else if (item.kind == EntryKind::kNotScanned) {
      ++coverage_.tensors_listed;
      add_not_scanned(frame, listing, item.why);
    } else {
      const bool is_passed = item.is_passed && next < tensors.size();
      const auto found = std::find_if(here.begin(), here.end(), [&](const auto& numbered) {
        return numbered.first == item.number;
      });
      const Entry* known = item.is_new           ? nullptr
                           : found == here.end() ? traced_.find(item.number, deferred_.num_sends())
                                                 : &frame.entries[found->second];
      if (!is_passed || known != nullptr) {
        next += is_passed;
        add_known(frame, listing, known);
        continue;
      }
      const at::Tensor& tensor = tensors[next++];
      if (item.is_returned && options_.watches_gradients) traced_.returned(tensor);
      const bool is_parameter = item.part == Part::kNamed && call.kind == FrameKind::kForward;
      if (!is_parameter || wants_parameter(tensor)) add_tensor(frame, listing, tensor);
      if (item.number >= 0) here.emplace_back(item.number, frame.entries.size() - 1);
    }
  }
}

// Adds a tensor that the same run of the compiled code has scanned before.
void Recorder::add_known(Frame& frame, Listing listing, const Entry* known) {
  ++coverage_.tensors_listed;
  if (known == nullptr) {
    return add_not_scanned(
        frame, listing,
        py::str("listed in an earlier frame of the compiled code, whose stat is gone"));
  }
  frame.entries.push_back(Entry(*known));
  Entry& entry = frame.entries.back();
  entry.listing = listing;
  entry.listing.role = role_of(frame.kind, listing.label);
  if (entry.kind == EntryKind::kNotScanned) coverage_.count(entry.why);
  const bool is_here = entry.slot.is_on_host();
  frame.is_bad |= is_here && entry.is_bad();
  frame.waits |= !is_here && entry.kind == EntryKind::kTensor;
}

void Recorder::count_hidden(const TracedCall& call) {
  for (const TracedCall::Item& item : call.items) {
    ++coverage_.tensors_listed;
    coverage_.count(item.why);
  }
}

}  // namespace overflow_fast
