// The recorder's frames once they are complete: classified, collected, kept.
#include <algorithm>

#include "../scan/callbacks.h"
#include "../scan/scan.h"
#include "../scan/tensor_view.h"
#include "../torch_internals/autograd_graph.h"
#include "../torch_internals/errors.h"
#include "../torch_internals/no_dispatch_guard.h"
#include "../torch_internals/python_tensor.h"
#include "recorder.h"

namespace overflow_fast {

bool Recorder::finish(Frame& frame) {
  if (frame.waits) deferred_.scan(frame, uses_memo(frame) ? &memo_ : nullptr, frame_mark_);
  if (frame.traced != nullptr) traced_.remember(frame);
  if (options_.step_mode && frame.is_of_call()) note_call(frame);
  spare_unscanned_ = std::move(frame.unscanned);
  if (!frame.waits && deferred_.is_empty()) {
    apply_rules(frame);
    if (frame.is_bad) scan_remembered(frame);
    return classify(frame);
  }
  deferred_.add(std::move(frame));
  return false;
}

void Recorder::note_call(const Frame& frame) {
  if (calls_.size() >= kMaxCalls) {
    calls_.erase(calls_.begin(), calls_.begin() + kMaxCalls / 2);
    num_calls_judged_ = 0;
  }
  // Of an output that is listed only if it is bad, no gradient is recorded.
  const bool has_unseen =
      frame.has_opaque ||
      std::any_of(frame.entries.begin(), frame.entries.end(), [](const Entry& entry) {
        const bool is_odd = entry.kind == EntryKind::kNotTensor || entry.listing.only_if_bad;
        return entry.kind == EntryKind::kNotScanned ||
               (is_odd && entry.listing.role != Role::kInput);
      });
  calls_.push_back({frame.module, frame.kind, frame.order, frame.batch, graph_thread(),
                    frame.newest_input, next_node_number(), frame.traced != nullptr, has_unseen});
}

void Recorder::forget_calls(bool forgets_all) {
  const size_t count = forgets_all ? calls_.size() : num_calls_judged_;
  calls_.erase(calls_.begin(), calls_.begin() + static_cast<int64_t>(count));
  num_calls_judged_ = calls_.size();
}

void Recorder::send(bool with_captured) {
  memo_.clear();  // its entries refer to slots that will be reused
  if (!rules_.is_empty()) {
    for (Frame& frame : deferred_.to_flag()) rules_.apply(frame, labels_, /*to_all=*/true);
  }
  deferred_.send();
  if (with_captured) deferred_.send_captured();
}

bool Recorder::wants_parameter(const at::Tensor& parameter) {
  if (!options_.parameters_once || !parameter.has_storage()) return true;
  const Course& own = course();
  auto& listed = own.is_evaluation ? evaluated_ : listed_;
  const auto version = version_of(parameter);
  const Listed now{weak_storage(parameter), version, own.batch};
  const auto [place, is_new] = listed.try_emplace(id_of(parameter), now);
  Listed& then = place->second;
  const bool is_written = own.is_evaluation && (!version || version != then.version);
  if (!is_new && !is_written && has_storage(parameter, then.memory)) return false;
  then = now;
  return true;
}

void Recorder::watch_output(const Frame& frame, LabelId label, const at::Tensor& output) {
  if (!options_.watches_gradients || !output.requires_grad()) return;
  if (traced_.has_returned(output)) return;
  if (class_names_.size() <= frame.module) class_names_.resize(frame.module + 1);
  class_names_[frame.module] = frame.class_name;
  watch_gradient(sink_, output, frame.module, label);
}

void Recorder::record_gradient(uint32_t module, LabelId label, const at::Tensor& gradient) {
  if (is_off()) return;
  const Stopwatch watch(seconds);
  try {
    const bool wants_it = wants_tensors();
    Frame frame = begin_frame(module, class_names_[module], FrameKind::kBackward);
    add_tensor(frame, {label}, gradient);
    finish(frame);
    if (wants_it && is_bad()) capture(to_python(gradient));
  } catch (...) {
    coverage_.count(current_exception_text());
  }
}

void Recorder::record(FrameKind kind, const std::vector<py::str>& names,
                      const std::vector<at::Tensor>& tensors) {
  fill(begin_frame(0, py::str(), kind), names, tensors);
}

bool Recorder::record_output(int64_t batch, const std::vector<py::str>& names,
                             const std::vector<at::Tensor>& tensors) {
  Frame frame = begin_frame(0, py::str(), FrameKind::kRecorded);
  frame.batch = batch;
  fill(std::move(frame), names, tensors);
  return results_.num_bad == 0 && deferred_.is_empty();
}

void Recorder::fill(Frame frame, const std::vector<py::str>& names,
                    const std::vector<at::Tensor>& tensors) {
  memo_.clear();
  const FrameKind kind = frame.kind;
  const uint64_t allowed = kind == FrameKind::kBuffers ? Slot::kNegativeInf : 0;  // additive masks
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (kind == FrameKind::kWeights && !wants_parameter(tensors[i])) continue;
    add_tensor(frame, {labels_.name(names[i].ptr()), false, allowed}, tensors[i]);
  }
  finish(frame);
  memo_.clear();
}

void Recorder::add_result(Frame&& frame) {
  headroom_.add(frame);
  rows_.add(frame);
  if (frame.has_failed && !frame.is_of_call()) failed_.push_back(frame);
  if (frame.is_bad) {
    if (results_.num_bad == 0) results_.before.assign(history_.begin(), history_.end());
    ++results_.num_bad;
    if (results_.bad.size() < kMaxBadFrames) results_.bad.push_back(frame);
  }
  if (!frame.is_of_call()) return;
  keep(std::move(frame));
}

void Recorder::scan_failed(const py::object& find) {
  for (Frame& frame : std::exchange(failed_, {})) {
    std::erase_if(frame.entries, [](const Entry& entry) { return !entry.has_failed; });
    for (Entry& entry : frame.entries) {
      const py::object found =
          find(frame.kind, labels_.label(entry.listing.label, entry.listing.role).name);
      if (is_tensor(found.ptr())) scan_failed(entry, tensor_of(found.ptr()));
    }
    frame.has_failed = false;
    frame.is_bad = std::ranges::any_of(frame.entries, &Entry::is_bad);
    apply_rules(frame);
    frame.is_bad |= std::ranges::any_of(frame.entries, &Entry::is_unseen);
    add_result(std::move(frame));
  }
}

void Recorder::scan_failed(Entry& entry, const at::Tensor& tensor) {
  try {
    const py::object values = py::reinterpret_borrow<py::object>(
        is_wrapper(tensor) ? callbacks().resolve(to_python(tensor)) : to_python(tensor));
    if (!is_tensor(values.ptr())) throw std::runtime_error("it has no values any more");
    const at::Tensor inner = tensor_of(values.ptr());
    const NoDispatchGuard no_dispatch;
    entry.stat = scan_anyhow(inner.detach());
    entry.dtype = *to_dtype(inner.scalar_type());
    coverage_.found(entry);
    coverage_.scanned(inner);
  } catch (...) {
    current_exception_text();              // as before, or more of the same
    const Role role = entry.listing.role;  // an update goes on from gradients, weights, the loss
    entry.is_unseen = role != Role::kBuffer && role != Role::kOptimizerState;
  }
}

std::vector<Underflow::Counts> Recorder::take_underflow() {
  if (deferred_.is_capturing()) return {};
  std::vector<Underflow::Counts> taken = underflow_.take();
  for (const Underflow::Counts& counts : taken) rows_.add(counts);
  return taken;
}

StepResults Recorder::take_step_results() { return std::exchange(results_, {}); }

void Recorder::apply_rules(Frame& frame) {
  if (frame.is_bad && !rules_.is_empty()) rules_.apply(frame, labels_, /*to_all=*/false);
}

bool Recorder::classify(Frame& frame) {
  apply_rules(frame);
  if (options_.step_mode) {
    add_result(std::move(frame));
    return false;
  }
  if (watches_every_frame || frame.is_bad) return true;
  keep(std::move(frame));
  return false;
}

void Recorder::process_arrived(size_t max_in_flight, const py::object& on_batch,
                               const py::object& on_frame) {
  std::optional<int64_t> batch;
  for (Frame& frame : deferred_.receive(max_in_flight)) {
    if (batch != frame.batch) on_batch(frame.batch);
    batch = frame.batch;
    if (classify(frame)) on_frame(std::move(frame));
  }
}

void Recorder::keep(Frame&& frame) {
  history_.push_back(std::move(frame));
  if (max_frames && static_cast<int64_t>(history_.size()) > *max_frames) {
    spare_ = std::move(history_.front().entries);
    history_.pop_front();
  }
}

void Recorder::end_step() {
  deferred_.begin_step();
  memo_.clear();
  failed_.clear();
  traced_.end_step();
  host_slots_.clear();
}

}  // namespace overflow_fast
