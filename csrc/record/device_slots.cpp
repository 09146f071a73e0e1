#include "device_slots.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <stdexcept>

#include "../scan/device_registry.h"
#include "../scan/kernel_check.h"
#include "../scan/torch_scan.h"
#include "../scan/torch_streams.h"
#include "../torch_internals/autograd_graph.h"
#include "../torch_internals/errors.h"
#include "../torch_internals/no_dispatch_guard.h"

namespace overflow_fast {

namespace {

// Frames of a few tensors wait for others; a long list has enough to reduce together.
constexpr size_t kFewTensors = 8;

}  // namespace

DeviceSlots::DeviceSlots(at::Device device)
    : device_(device),
      api_(checked_device(device)),
      torch_streams_(find_device(device) == nullptr ? torch_streams(device) : nullptr),
      streams_(torch_streams_ == nullptr ? find_device(device) : torch_streams_.get()),
      step_end_(device, api_, streams_ != nullptr) {}

DeviceSlots::~DeviceSlots() {
  // A captured scan writes its slots whenever the graph is replayed, also when these are gone.
  if (captured_.used > 0) keep_for_ever(captured_.chunks);
  // The allocator reuses freed memory at once on the stream that allocated it, while another stream
  // may still use it.
  if (streams_seen_ > 1 && !step_.chunks.empty()) {
    try {
      streams_->is_capturing() ? keep_for_ever(step_.chunks) : synchronize();
    } catch (...) {  // the device is lost, and its memory with it
    }
  }
}

void DeviceSlots::synchronize() {
  const py::gil_scoped_release release;
  streams_->synchronize();
}

// An event that nobody waits for any more.
std::shared_ptr<DeviceEvent> DeviceSlots::take_event() {
  for (const auto& event : events_) {
    if (event.use_count() != 1) continue;
    event->poll(nullptr, 0);
    return event;
  }
  return events_.emplace_back(streams_->make_event());
}

int64_t DeviceSlots::current_stream() {
  const int64_t stream = streams_->current_stream();
  if (streams_seen_ == 0 || stream != last_stream_) ++streams_seen_;
  last_stream_ = stream;
  return stream;
}

void DeviceSlots::notice_capture(size_t mark) {
  const std::thread::id thread = std::this_thread::get_id();
  if ((mark == mark_ && thread == thread_) || streams_ == nullptr) return;
  mark_ = mark;
  thread_ = thread;
  is_capturing_ = streams_->is_capturing();
}

bool DeviceSlots::is_capturing_now() {
  try {
    return streams_ != nullptr && streams_->is_capturing();
  } catch (...) {
    return false;  // the device is lost: its next call reports that
  }
}

void DeviceSlots::scan(std::vector<Unscanned>& tensors) {
  try {
    queue(tensors);
  } catch (...) {
    const py::object why = current_exception_text();
    for (Unscanned& tensor : tensors) {
      if (tensor.tensor.device() == device_) tensor.error = why;
    }
  }
}

void DeviceSlots::queue(std::vector<Unscanned>& tensors) {
  if (is_capturing_ && api_ == nullptr) {
    throw std::runtime_error("no kernel to scan it with, while a graph is captured");
  }
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
  // Before the pool grows as well: the reset of a new chunk is then later than that of the others.
  if (!is_capturing_) join_current_stream();
  while (first + count > pool.capacity()) grow(pool);
  if (!is_capturing_) {
    join_current_stream();
    join_makers(tensors);
  }
  pool.used += count;  // also if a launch fails: some of the slots may have been written
  if (api_ == nullptr) return scan_by_torch(tensors);
  if (is_capturing_) return launch(pool, views_, first, api_->current_stream());
  try {
    return launch(pool, views_, first, last_stream_);
  } catch (...) {
    note_failed_launch(device_);
  }
  api_ = nullptr;
  scan_by_torch(tensors);  // over what the launch has written
}

void DeviceSlots::launch(Pool& pool, const std::vector<View>& views, int64_t first,
                         int64_t stream) {
  const auto count = static_cast<int64_t>(views.size());
  for (int64_t done = 0; done < count;) {
    const int64_t row = (first + done) % kChunk;
    const int64_t some = std::min(count - done, kChunk - row);
    auto* slots = static_cast<Slot*>(pool.chunks[(first + done) / kChunk].mutable_data_ptr());
    const SeenStep seen = &pool == &step_ ? seen_.from(first + done) : SeenStep{};
    api_->scan(views.data() + done, some, slots + row, stream, seen);
    if (&pool == &step_) note_written(stream);
    done += some;
  }
}

// Marks the end of what a stream has written, where it may no longer exist at the end of the step.
void DeviceSlots::note_written(int64_t stream) {
  if (streams_ == nullptr || streams_->is_lasting(stream)) return;
  for (StreamUse& use : stream_uses_) {
    if (use.stream != stream) continue;
    if (use.written == nullptr) use.written = take_event();
    use.written->record(stream);
  }
}

// Few small tensors wait for others, those of lists are scanned together: one call for each chunk
// that their slots lie in.
void DeviceSlots::scan_by_torch(std::vector<Unscanned>& tensors) {
  const NoDispatchGuard no_dispatch;
  std::vector<Unscanned*> some;
  const bool is_few = views_.size() <= kFewTensors;
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
    const bool is_apart = is_few && scan_later(tensor);
    if (!some.empty() && (is_apart || tensor.slot.index % kChunk == 0)) scan_some();
    if (!is_apart) some.push_back(&tensor);
  }
  if (!some.empty()) scan_some();
  note_written(last_stream_);
}

// Holds a copy of a tensor, and returns whether it did, or knows now why that is not possible.
bool DeviceSlots::scan_later(Unscanned& tensor) {
  // A stream that may end before the copies are scanned takes none.
  const bool is_lasting = streams_ == nullptr || streams_->is_lasting(last_stream_);
  if (!is_lasting || !is_known_to_scan(tensor.tensor)) return false;
  const auto slot = static_cast<int64_t>(tensor.slot.index);
  const bool fits = slot % kChunk != 0 && copies_.is_next(slot, last_stream_);
  if (!copies_.is_empty() && (!fits || copies_.is_full())) scan_held();
  try {
    copies_.add(tensor.tensor.detach(), slot, last_stream_);
  } catch (...) {
    tensor.error =
        py::str(remembered_failure(tensor.tensor.device().type(), tensor.tensor.scalar_type()));
  }
  return true;
}

// Runs on the stream of the copies, where the memory of all is ordered.
void DeviceSlots::scan_held() {
  if (copies_.is_empty()) return;
  const NoDispatchGuard no_dispatch;
  const c10::OptionalStreamGuard guard(
      streams_ == nullptr
          ? std::nullopt
          : std::optional(c10::Stream(c10::Stream::UNSAFE, device_, copies_.stream())));
  const int64_t first = copies_.first_slot();
  const std::vector<std::string> why = copies_.scan(step_.chunks[first / kChunk], first % kChunk);
  for (size_t i = 0; i < why.size(); ++i) {
    if (!why[i].empty()) failures_[first + static_cast<int64_t>(i)] = py::str(why[i]);
  }
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
    if (&pool == &step_ && api_ != nullptr) {
      seen_.grow(pool.chunks.size() + 1, step_end_.is_pinned());
    }
    pool.chunks.push_back(std::move(chunk));
  } catch (...) {
    growth_error_ = current_exception_text();
    throw;
  }
}

void DeviceSlots::mark_reset() {
  if (streams_ == nullptr) return;
  std::shared_ptr<DeviceEvent> event = take_event();
  reset_stream_ = current_stream();
  event->record(reset_stream_);
  last_reset_ = std::move(event);
}

void DeviceSlots::join_current_stream() {
  if (streams_ == nullptr) return;
  const int64_t stream = current_stream();
  auto use = std::find_if(stream_uses_.begin(), stream_uses_.end(),
                          [&](const StreamUse& known) { return known.stream == stream; });
  if (use == stream_uses_.end()) use = stream_uses_.insert(use, {stream, nullptr, nullptr});
  if (use->waited_for == last_reset_) return;
  if (last_reset_ && stream != reset_stream_) last_reset_->block(stream);
  use->waited_for = last_reset_;
}

// A call may return what another stream still writes, for its caller to wait for. A view is no work
// on a stream: what writes it is what writes its base.
void DeviceSlots::join_makers(const std::vector<Unscanned>& tensors) {
  if (streams_ == nullptr || device_.is_cpu()) return;
  const auto join = [&](const at::TensorBase& tensor) {
    const std::optional<c10::Stream> maker = overflow_fast::stream_of(tensor);
    if (!maker || maker->device() != device_ || maker->id() == last_stream_) return;
    const std::shared_ptr<DeviceEvent> event = take_event();
    event->record(maker->id());
    event->block(last_stream_);
  };
  for (const Unscanned& each : tensors) {
    if (!each.is_output || each.tensor.device() != device_) continue;
    try {
      join(each.tensor);
      if (each.tensor.is_view()) join(each.tensor._base());
    } catch (...) {
      current_exception_text();  // the stream has ended, and with it its work
    }
  }
}

void DeviceSlots::wait_for_all() {
  if (streams_ != nullptr) synchronize();
}

Transfer DeviceSlots::send(const std::vector<int64_t>& flag_bits) {
  scan_held();
  Transfer transfer = send(step_, flag_bits);
  transfer.failures = std::exchange(failures_, {});
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
  // A graph may have been replayed on any stream. Other threads may capture another one meanwhile.
  std::string lost;
  try {
    if (captured_.used != 0) synchronize();
  } catch (...) {
    lost = current_exception_text().cast<std::string>();
  }
  const int64_t used = captured_.used;
  if (!lost.empty()) {
    Transfer transfer;
    transfer.error = py::str(lost);
    return transfer;
  }
  Transfer transfer = send(captured_, {});
  captured_.used = used;
  return transfer;
}

Transfer DeviceSlots::send(Pool& pool, const std::vector<int64_t>& flag_bits) {
  Transfer transfer;
  transfer.count_ = pool.used;
  if (pool.used == 0) return transfer;
  if (&pool == &step_) transfer.seen = seen_.end_step();
  try {
    const NoDispatchGuard no_dispatch;
    wait_for_streams();
    step_end_.queue(pool.chunks, flag_bits, transfer);
    mark_reset();
    transfer.follow(last_reset_);
    transfer.keep(std::exchange(retired_, {}));
    if (&pool == &step_) stream_uses_.clear();
  } catch (...) {
    transfer.error = current_exception_text();
    // Slots that may not have been reset would carry this step's stats into the next one. Those of
    // captured scans must keep their addresses. The others are freed once a step has waited for
    // the streams that write them, if there is more than one.
    if (&pool == &step_) {
      if (streams_seen_ > 1)
        retired_.insert(retired_.end(), pool.chunks.begin(), pool.chunks.end());
      pool.chunks.clear();
    }
  }
  pool.used = 0;
  return transfer;
}

// Makes the current stream wait for those that wrote slots.
void DeviceSlots::wait_for_streams() {
  if (streams_ == nullptr) return;
  const int64_t stream = current_stream();
  for (const StreamUse& use : stream_uses_) {
    if (use.stream == stream) continue;
    std::shared_ptr<DeviceEvent> written = use.written;
    if (written == nullptr) {
      if (!streams_->is_lasting(use.stream)) continue;  // nothing was written
      written = take_event();
      written->record(use.stream);
    }
    written->block(stream);
  }
}

}  // namespace overflow_fast
