#include "device_slots.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <stdexcept>

#include "../scan/device_registry.h"
#include "../scan/torch_scan.h"
#include "../torch_internals/errors.h"
#include "../torch_internals/no_dispatch_guard.h"

namespace overflow_fast {

namespace {

// A captured scan writes its slots whenever the graph is replayed, also when the recorder is gone:
// their memory must never be freed.
void keep_for_ever(const std::vector<at::Tensor>& chunks) {
  static auto* kept = new std::vector<at::Tensor>;
  kept->insert(kept->end(), chunks.begin(), chunks.end());
}

}  // namespace

DeviceSlots::DeviceSlots(at::Device device)
    : device_(device),
      api_(find_device(device)),
      step_end_(device, api_),
      held_(read_variants().held_frames) {}

DeviceSlots::~DeviceSlots() {
  if (captured_.used > 0) keep_for_ever(captured_.chunks);
  // The allocator reuses freed memory at once on the stream that allocated it, while another stream
  // may still use it.
  if (streams_seen_ > 1 && !step_.chunks.empty()) {
    try {
      api_->is_capturing() ? keep_for_ever(step_.chunks) : api_->synchronize();
    } catch (...) {  // the device is lost, and its memory with it
    }
  }
}

int64_t DeviceSlots::current_stream() {
  const int64_t stream = api_->current_stream();
  if (streams_seen_ == 0 || stream != last_stream_) ++streams_seen_;
  last_stream_ = stream;
  return stream;
}

void DeviceSlots::notice_capture(size_t mark) {
  if (mark == mark_ || api_ == nullptr) return;
  mark_ = mark;
  is_capturing_ = api_->is_capturing();
}

bool DeviceSlots::is_capturing_now() {
  try {
    return api_ != nullptr && api_->is_capturing();
  } catch (...) {
    return false;  // the device is lost: its next call reports that
  }
}

void DeviceSlots::scan(std::vector<Unscanned>& tensors, bool may_wait) {
  try {
    queue(tensors, may_wait);
  } catch (...) {
    const py::object why = current_exception_text();
    for (Unscanned& tensor : tensors) {
      if (tensor.tensor.device() == device_) tensor.error = why;
    }
  }
}

void DeviceSlots::queue(std::vector<Unscanned>& tensors, bool may_wait) {
  Pool& pool = is_capturing_ ? captured_ : step_;
  const int64_t first = pool.used;
  views_.clear();
  for (Unscanned& tensor : tensors) {
    if (tensor.tensor.device() != device_) continue;
    tensor.slot.kind = is_capturing_ ? SlotRef::Kind::kCaptured : SlotRef::Kind::kDevice;
    tensor.slot.index = static_cast<uint32_t>(first + static_cast<int64_t>(views_.size()));
    views_.push_back(tensor.view);
  }
  const auto count = static_cast<int64_t>(views_.size());
  while (first + count > pool.capacity()) grow(pool);
  if (!is_capturing_) join_current_stream();
  pool.used += count;  // also if a launch fails: some of the slots may have been written
  if (api_ == nullptr) return scan_by_torch(tensors);
  if (held_.is_wanted() && !is_capturing_) return hold(tensors, first, may_wait);
  launch(pool, views_, first, is_capturing_ ? api_->current_stream() : last_stream_);
}

void DeviceSlots::launch(Pool& pool, const std::vector<View>& views, int64_t first,
                         int64_t stream) {
  const auto count = static_cast<int64_t>(views.size());
  for (int64_t done = 0; done < count;) {
    const int64_t row = (first + done) % kChunk;
    const int64_t some = std::min(count - done, kChunk - row);
    auto* slots = static_cast<Slot*>(pool.chunks[(first + done) / kChunk].mutable_data_ptr());
    api_->scan(views.data() + done, some, slots + row, stream);
    done += some;
  }
}

void DeviceSlots::hold(const std::vector<Unscanned>& tensors, int64_t first, bool may_wait) {
  if (!held_.is_empty() && held_.stream() != last_stream_) launch_held();
  held_.begin_frame(first, last_stream_);
  for (const Unscanned& tensor : tensors) {
    if (tensor.tensor.device() == device_) held_.add(tensor.tensor, tensor.view);
  }
  if (!may_wait || held_.is_full()) launch_held();
}

void DeviceSlots::launch_held() {
  if (held_.is_empty()) return;
  try {
    launch(step_, held_.views(), held_.first_slot(), held_.stream());
  } catch (...) {
    current_exception_text();  // decode() reports the slots that stay empty
  }
  held_.clear();
}

// Makes one call for each chunk that the slots lie in.
void DeviceSlots::scan_by_torch(std::vector<Unscanned>& tensors) {
  const NoDispatchGuard no_dispatch;
  std::vector<Unscanned*> some;
  const auto scan_some = [&] {
    std::vector<at::Tensor> values;
    for (const Unscanned* each : some) values.push_back(each->tensor.detach());
    const auto first = static_cast<int64_t>(some.front()->slot.index);
    const std::vector<std::string> why =
        try_scan_there(step_.chunks[first / kChunk], first % kChunk, values, TorchScan::kAuto);
    for (size_t i = 0; i < some.size(); ++i) {
      if (!why[i].empty()) some[i]->error = py::str(why[i]);
    }
    some.clear();
  };
  for (Unscanned& tensor : tensors) {
    if (tensor.tensor.device() != device_) continue;
    if (!some.empty() && tensor.slot.index % kChunk == 0) scan_some();
    some.push_back(&tensor);
  }
  if (!some.empty()) scan_some();
}

void DeviceSlots::grow(Pool& pool) {
  if (is_capturing_) {
    throw std::runtime_error(
        "no slots left while a graph is captured: run one forward before the capture");
  }
  if (growth_error_) throw std::runtime_error(growth_error_.cast<std::string>());
  try {
    const NoDispatchGuard no_dispatch;
    const c10::InferenceMode normal(false);  // inference tensors cannot be written to outside
    at::Tensor chunk = at::empty({kChunk, 4}, at::TensorOptions().dtype(at::kLong).device(device_));
    reset_slots(chunk);
    mark_reset();
    pool.chunks.push_back(std::move(chunk));
  } catch (...) {
    growth_error_ = current_exception_text();
    throw;
  }
}

void DeviceSlots::mark_reset() {
  if (api_ == nullptr) return;
  std::shared_ptr<DeviceEvent> event = api_->make_event();
  reset_stream_ = current_stream();
  event->record(reset_stream_);
  last_reset_ = std::move(event);
}

void DeviceSlots::join_current_stream() {
  if (api_ == nullptr) return;
  const int64_t stream = current_stream();
  auto use = std::find_if(stream_uses_.begin(), stream_uses_.end(),
                          [&](const StreamUse& known) { return known.stream == stream; });
  if (use == stream_uses_.end()) use = stream_uses_.insert(use, {stream, nullptr});
  if (use->waited_for == last_reset_) return;
  if (last_reset_ && stream != reset_stream_) last_reset_->block(stream);
  use->waited_for = last_reset_;
}

Transfer DeviceSlots::send(const std::vector<int64_t>& flag_bits) {
  launch_held();
  Transfer transfer = send(step_, flag_bits);
  stream_uses_.clear();
  // A capture may come next, and cannot allocate.
  try {
    const int64_t wanted = captured_.used + transfer.count_;
    while (api_ != nullptr && wanted > captured_.capacity()) grow(captured_);
  } catch (...) {
    current_exception_text();  // reported if a capture comes
  }
  growth_error_ = py::object();
  return transfer;
}

Transfer DeviceSlots::send_captured() {
  const int64_t used = captured_.used;
  Transfer transfer = send(captured_, {});
  captured_.used = used;
  return transfer;
}

Transfer DeviceSlots::send(Pool& pool, const std::vector<int64_t>& flag_bits) {
  Transfer transfer;
  transfer.count_ = pool.used;
  if (pool.used == 0) return transfer;
  try {
    const NoDispatchGuard no_dispatch;
    // A graph may have been replayed on any stream.
    if (&pool == &captured_) api_->synchronize();
    wait_for_streams();
    step_end_.queue(pool.chunks, flag_bits, transfer);
    mark_reset();
    transfer.follow(last_reset_);
  } catch (...) {
    transfer.error = current_exception_text();
    // Slots that may not have been reset would carry this step's stats into the next one. Those of
    // captured scans must keep their addresses.
    if (&pool == &step_) pool.chunks.clear();
  }
  pool.used = 0;
  return transfer;
}

// Makes the current stream wait for those that wrote slots.
void DeviceSlots::wait_for_streams() {
  if (api_ == nullptr) return;
  const int64_t stream = current_stream();
  for (const StreamUse& use : stream_uses_) {
    if (use.stream == stream) continue;
    const auto written = api_->make_event();
    written->record(use.stream);
    written->block(stream);
  }
}

}  // namespace overflow_fast
