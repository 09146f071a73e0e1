#include "deferred.h"

#include <algorithm>
#include <set>

#include "../scan/callbacks.h"
#include "../scan/device_registry.h"
#include "../torch_internals/errors.h"

namespace overflow_fast {

namespace {

bool is_deferred(const Entry& entry) {
  return entry.kind == EntryKind::kTensor && entry.slot.is_awaited();
}

bool is_on_device(const Entry& entry) { return is_deferred(entry) && entry.slot.is_on_device(); }

}  // namespace

// What is in flight writes to the host's memory, which CUDA's allocator keeps for it, and perhaps
// no other's.
Deferred::~Deferred() {
  for (InFlightBatch& batch : in_flight_) {
    for (size_t i = 0; i < batch.transfers.size(); ++i) {
      if (devices_[i].has_kernels() || batch.transfers[i].has_arrived()) continue;
      const py::gil_scoped_release release;
      batch.transfers[i].wait();
    }
  }
}

size_t Deferred::number_of(at::Device device) {
  size_t at = 0;
  while (at < devices_.size() && devices_[at].device() != device) ++at;
  if (at == devices_.size()) {
    devices_.emplace_back(device);
    if (device.is_cuda() && !has_kernels(device.type())) {
      callbacks().warn_of_no_kernels();
    }
  }
  return at;
}

bool Deferred::is_outdated(SlotRef slot, size_t mark) {
  if (!slot.is_on_device()) return false;
  DeviceSlots& device = devices_[slot.device];
  device.notice_capture(mark);
  return device.is_capturing() != slot.is_captured();
}

void Deferred::scan(Frame& frame, Memo* memo, size_t mark) {
  for (Unscanned& tensor : frame.unscanned) {
    if (tensor.slot.is_on_device() || tensor.error) continue;
    try {
      DeviceSlots& device = devices_[number_of(tensor.tensor.device())];
      device.notice_capture(mark);
      device.scan(frame.unscanned);
    } catch (...) {
      tensor.error = current_exception_text();
    }
  }
  for (Entry& entry : frame.entries) {
    if (is_deferred(entry) && frame.sends != num_sends_) {
      coverage_.give_up(entry, py::str("another thread ended the step meanwhile"));
    } else if (entry.kind == EntryKind::kTensor && entry.slot.kind == SlotRef::Kind::kUnscanned) {
      assign_slot(frame, entry, frame.unscanned[entry.slot.index]);
    }
    if (is_deferred(entry) && entry.slot.is_captured()) frame.capture = step_;
  }
  for (Unscanned& tensor : frame.unscanned) {
    if (tensor.error) continue;
    coverage_.scanned(tensor.tensor);
    const Memo::Known known{slot_of(tensor), tensor.view.dtype, frame.order};
    if (memo) memo->insert(tensor.tensor, Memo::Key::of(tensor.tensor), known, mark);
  }
  frame.unscanned.clear();
}

SlotRef Deferred::slot_of(const Unscanned& tensor) {
  SlotRef slot = tensor.slot;
  slot.device = static_cast<uint16_t>(number_of(tensor.tensor.device()));
  return slot;
}

// Gives an entry its tensor's slot, or the reason why the tensor was not scanned.
void Deferred::assign_slot(Frame& frame, Entry& entry, const Unscanned& tensor) {
  if (tensor.error) {
    coverage_.fail(frame, entry, tensor.error);
  } else {
    entry.slot = slot_of(tensor);
  }
}

void Deferred::add(Frame&& frame) {
  (frame.capture != 0 ? captured_ : waiting_).push_back(std::move(frame));
}

bool Deferred::is_capturing() {
  return std::any_of(devices_.begin(), devices_.end(),
                     [](DeviceSlots& device) { return device.is_capturing_now(); });
}

void Deferred::send() {
  if (waiting_.empty() || is_capturing()) return;
  ++num_sends_;
  InFlightBatch batch;
  for (size_t i = 0; i < devices_.size(); ++i) {
    std::vector<int64_t> flag_bits;
    if (wants_flags_) flag_bits = flag_bits_of(i);
    batch.transfers.push_back(devices_[i].send(flag_bits));
    num_syncs_ += batch.transfers.back().num_waits();
  }
  batch.frames.swap(waiting_);
  batch.pinned.swap(pinned_);
  in_flight_.push_back(std::move(batch));
}

// The kinds of non-finite values of each slot that set a flag: see StepEnder::queue().
std::vector<int64_t> Deferred::flag_bits_of(size_t device) const {
  const auto used = static_cast<size_t>(devices_[device].used());
  std::vector<int64_t> flag_bits(used * kNumFlags);
  for (const Frame& frame : waiting_) {
    const bool is_gradient = frame.is_of_gradients();
    for (const Entry& entry : frame.entries) {
      if (!is_on_device(entry) || entry.slot.is_captured() || entry.slot.device != device) {
        continue;
      }
      constexpr uint64_t kAll = Slot::kPositiveInf | Slot::kNegativeInf | Slot::kNan;
      flag_bits[is_gradient * used + entry.slot.index] |=
          static_cast<int64_t>(kAll & ~entry.listing.allowed);
    }
  }
  return flag_bits;
}

std::vector<at::Tensor> Deferred::take_flags() {
  std::vector<at::Tensor> flags;
  for (DeviceSlots& device : devices_) {
    at::Tensor folded = device.take_flags();
    if (folded.defined()) flags.push_back(std::move(folded));
  }
  return flags;
}

void Deferred::send_captured() {
  if (captured_.empty() || is_capturing()) return;
  InFlightBatch batch;
  batch.frames = captured_;
  for (DeviceSlots& device : devices_) batch.transfers.push_back(device.send_captured());
  in_flight_.push_back(std::move(batch));
}

bool Deferred::waits_for(int64_t order) const {
  const auto waits = [order](const std::vector<Frame>& frames) {
    return !frames.empty() && frames.front().capture == 0 && frames.front().order <= order;
  };
  return waits(waiting_) ||
         std::any_of(in_flight_.begin(), in_flight_.end(),
                     [&](const InFlightBatch& batch) { return waits(batch.frames); });
}

bool Deferred::InFlightBatch::has_arrived() {
  return std::all_of(transfers.begin(), transfers.end(),
                     [](Transfer& transfer) { return transfer.has_arrived(); });
}

std::vector<Frame> Deferred::receive(size_t max_in_flight) {
  std::vector<Frame> frames;
  if (in_flight_.empty() || is_capturing()) return frames;
  while (in_flight_.size() > max_in_flight ||
         (!in_flight_.empty() && in_flight_.front().has_arrived())) {
    InFlightBatch batch = std::move(in_flight_.front());
    in_flight_.pop_front();
    for (Transfer& transfer : batch.transfers) num_syncs_ += !transfer.has_arrived();
    {
      const py::gil_scoped_release release;
      for (Transfer& transfer : batch.transfers) transfer.wait();
    }
    if (batch.frames.front().capture != 0) drop_idle_graphs(batch);
    for (const Transfer& transfer : batch.transfers) {
      if (transfer.lost) lost_ = transfer.lost;
    }
    scan_pinned(batch);
    for (Frame& frame : batch.frames) {
      decode(frame, batch);
      frames.push_back(std::move(frame));
    }
    for (size_t i = 0; i < batch.transfers.size(); ++i) {
      devices_[i].recycle(std::move(batch.transfers[i]));
    }
  }
  return frames;
}

void Deferred::raise_lost() {
  if (lost_) std::rethrow_exception(std::exchange(lost_, nullptr));
}

SlotRef Deferred::add_pinned(const at::Tensor& tensor) {
  pinned_.emplace_back(tensor);
  return {SlotRef::Kind::kPinned, 0, static_cast<uint32_t>(pinned_.size() - 1)};
}

// What the step's slots came behind has arrived as well. Only a copy on a stream that wrote none
// may be later still, which costs another wait where it shows.
void Deferred::scan_pinned(InFlightBatch& batch) {
  if (batch.pinned.empty()) return;
  for (Pinned& each : batch.pinned) {
    each.scan(coverage_);
    for (const Transfer& transfer : batch.transfers) {
      if (transfer.error) each.error = transfer.error;
    }
  }
  const auto is_bad = [](const Pinned& each) { return !each.error && !each.stat.is_finite(); };
  if (std::ranges::none_of(batch.pinned, is_bad)) return;
  py::object lost;
  try {
    for (DeviceSlots& device : devices_) device.wait_for_all();
  } catch (...) {
    lost = current_exception_text();
  }
  for (Pinned& each : batch.pinned) {
    if (is_bad(each)) lost ? void(each.error = lost) : each.scan_again();
  }
}

void Deferred::decode(Frame& frame, const InFlightBatch& batch) {
  for (Entry& entry : frame.entries) {
    if (!is_deferred(entry)) continue;
    if (!entry.slot.is_on_device()) {
      const Pinned& pinned = batch.pinned[entry.slot.index];
      entry.stat = pinned.stat;
      if (pinned.error) coverage_.fail(frame, entry, pinned.error);
      frame.is_bad |= entry.is_bad();
      continue;
    }
    const Transfer& transfer = batch.transfers[entry.slot.device];
    if (transfer.error) {
      entry.stat = transfer.seen.stat(entry.slot.index);
      if (entry.stat.is_finite()) coverage_.fail(frame, entry, transfer.error);
      frame.is_bad |= entry.is_bad();
      continue;
    }
    if (const auto failure = transfer.failures.find(entry.slot.index);
        failure != transfer.failures.end()) {
      coverage_.fail(frame, entry, failure->second);
      continue;
    }
    entry.stat = transfer.slot(entry.slot.index);
    if (entry.stat.is_empty() && entry.numel != 0) {
      coverage_.fail(frame, entry, py::str("its scan did not run"));
    }
    frame.is_bad |= entry.is_bad();
  }
}

// Drops the frames of graphs that were not replayed: none of their slots was written.
void Deferred::drop_idle_graphs(InFlightBatch& batch) const {
  std::set<int64_t> replayed;
  for (const Frame& frame : batch.frames) {
    for (const Entry& entry : frame.entries) {
      if (!is_on_device(entry)) continue;
      const Transfer& transfer = batch.transfers[entry.slot.device];
      if (transfer.error || !transfer.slot(entry.slot.index).is_empty()) {
        replayed.insert(frame.capture);
      }
    }
  }
  std::erase_if(batch.frames, [&](const Frame& f) { return !replayed.contains(f.capture); });
}

}  // namespace overflow_fast
