#include "recorder.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "scan.h"
#include "tensor_view.h"

namespace overflow_fast {

namespace {

// Another thread that waits for the GIL keeps it for up to its switch interval (5 ms), so it is
// let go only for scans of more than about 10 us.
constexpr int64_t kReleaseGilBytes = 1 << 20;

void reset(at::Tensor& slots) {
  slots.zero_();
  slots.select(1, 0).fill_(-1);
}

const py::object& resolver() {
  static const auto* function =  // never freed: the interpreter may be gone by then
      new py::object(py::module_::import("overflow_fast.tensors").attr("resolve"));
  return *function;
}

py::object reason_for(const at::Tensor& tensor, Readability readability) {
  return py::module_::import("overflow_fast.tensors")
      .attr("reason")(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)), readability);
}

// Our own operations are no part of the watched program: no gradient, and nothing to be seen by
// a mode that the user has switched on.
struct Unseen {
  c10::AutoGradMode no_grad{false};
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet(c10::DispatchKey::Python) |
      c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot)};
};

}  // namespace

py::str current_exception_text() {
  try {
    try {
      throw;
    } catch (const python_error&) {  // torch's: the error is still where Python keeps it
      throw py::error_already_set();
    }
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // KeyboardInterrupt is the user's
    return py::str("{}: {}").format(error.type().attr("__name__"), error.value());
  } catch (const c10::Error& error) {
    return py::str(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return py::str(error.what());
  }
}

int64_t DeviceSlots::scan(const at::Tensor& tensor) {
  const Unseen unseen;
  const int64_t slot = used_++;
  if (slot / kChunk >= static_cast<int64_t>(chunks_.size())) {
    chunks_.push_back(at::empty({kChunk, 4}, at::TensorOptions().dtype(at::kLong).device(device_)));
    reset(chunks_.back());
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("overflow_fast::scan_composite", "")
                             .typed<void(const at::Tensor&, int64_t, at::TensorList)>();
  op.call(chunks_[slot / kChunk], slot % kChunk, {tensor.detach()});
  return slot;
}

std::vector<Slot> DeviceSlots::take() {
  const Unseen unseen;
  std::vector<Slot> slots(used_);
  for (int64_t begin = 0; begin < used_; begin += kChunk) {
    const int64_t count = std::min(kChunk, used_ - begin);
    at::Tensor& chunk = chunks_[begin / kChunk];
    const at::Tensor host = chunk.narrow(0, 0, count).cpu();
    const auto* words = static_cast<const Slot*>(host.const_data_ptr());
    std::copy(words, words + count, slots.begin() + begin);
    reset(chunk);
  }
  used_ = 0;
  return slots;
}

Recorder::Recorder(std::optional<int64_t> max_frames, Options options)
    : max_frames(max_frames), options_(options) {}

Frame Recorder::begin_frame(uint32_t module, py::object type, bool is_recomputed) {
  ++total_calls;
  ++frame_mark_;
  // What backward computes again belongs to the batch that is over.
  Frame frame{module, std::move(type), is_recomputed ? last_batch() : batch_,
              opens_batch_ && !is_recomputed, is_recomputed};
  frame.entries = std::move(spare_);
  frame.entries.clear();
  opens_batch_ &= is_recomputed;
  return frame;
}

void Recorder::add_none(Frame& frame, Listing listing) {
  frame.entries.push_back({{}, 0, {}, 0, listing, EntryKind::kNone, {}});
}

void Recorder::add_not_tensor(Frame& frame, Listing listing) {
  frame.entries.push_back({{}, 0, {}, 0, listing, EntryKind::kNotTensor, {}});
}

void Recorder::add_not_scanned(Frame& frame, Listing listing, py::object why) {
  frame.entries.push_back({{}, 0, std::move(why), 0, listing, EntryKind::kNotScanned, {}});
}

void Recorder::add_tensor(Frame& frame, Listing listing, PyObject* object) {
  ++tensors_listed;
  try {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (options_.use_memo) {
      const Memo::Known* known = memo_.find(tensor, frame_mark_);
      if (known != nullptr) return add_stat(frame, listing, tensor, *known);
    }
    View view{};
    const Readability readability = view_of(tensor, view);
    if (readability == Readability::kReadable) return add_scanned(frame, listing, tensor, view);
    if (readability != Readability::kIndirect) {
      return add_not_scanned(frame, listing, reason_for(tensor, readability));
    }
    add_indirect(frame, listing, object);
  } catch (...) {
    add_not_scanned(frame, listing, current_exception_text());
  }
}

void Recorder::add_indirect(Frame& frame, Listing listing, PyObject* object) {
  const py::object values = resolver()(py::reinterpret_borrow<py::object>(object));
  if (!THPVariable_Check(values.ptr())) return add_not_scanned(frame, listing, values);
  const at::Tensor& inner = THPVariable_Unpack(values.ptr());
  View view{};
  const Readability readability = view_of(inner, view);
  if (readability == Readability::kReadable) return add_scanned(frame, listing, inner, view);
  add_not_scanned(frame, listing, reason_for(inner, readability));
}

void Recorder::add_scanned(Frame& frame, Listing listing, const at::Tensor& tensor,
                           const View& view) {
  const size_t mark = frame_mark_;
  const bool is_brief = is_here(tensor) && static_cast<int64_t>(tensor.nbytes()) < kMinMemoBytes;
  std::optional<Memo::Key> key;
  // Taken before the scan: a write that another thread makes meanwhile must not be missed later.
  if (options_.use_memo && !is_brief) key = Memo::Key::of(tensor);
  const Memo::Known known{scan_to_slot(tensor, view), view.dtype};
  if (key) memo_.insert(tensor, *key, known, mark);
  add_stat(frame, listing, tensor, known);
}

void Recorder::add_stat(Frame& frame, Listing listing, const at::Tensor& tensor,
                        Memo::Known known) {
  const bool is_here = known.slot < kDeviceSlots;
  frame.entries.push_back({is_here ? host_slots_[known.slot] : Slot{},
                           known.slot,
                           {},
                           tensor.numel(),
                           listing,
                           EntryKind::kTensor,
                           known.dtype});
  frame.is_bad |= frame.entries.back().is_bad();
  frame.waits |= !is_here;
}

int64_t Recorder::scan_to_slot(const at::Tensor& tensor, const View& view) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  ++tensors_scanned;
  bytes_scanned += bytes;
  if (!is_here(tensor)) return scan_on_device(tensor);
  Slot slot;
  if (bytes >= kReleaseGilBytes) {
    const at::Tensor kept = tensor;  // another thread may drop it from its container meanwhile
    const py::gil_scoped_release release;
    scan_cpu(view, slot);
  } else {
    scan_cpu(view, slot);
  }
  host_slots_.push_back(slot);
  return static_cast<int64_t>(host_slots_.size()) - 1;
}

int64_t Recorder::scan_on_device(const at::Tensor& tensor) {
  size_t at = 0;
  while (at < devices_.size() && devices_[at].first != tensor.device()) ++at;
  if (at == devices_.size()) devices_.emplace_back(tensor.device(), DeviceSlots(tensor.device()));
  return kDeviceSlots * static_cast<int64_t>(at + 1) + devices_[at].second.scan(tensor);
}

bool Recorder::finish(Frame& frame) {
  if (!frame.waits && waiting_.empty()) return judge(frame);
  waiting_.push_back(std::move(frame));
  return false;
}

bool Recorder::judge(Frame& frame) {
  if (watches_every_frame || frame.is_bad) return true;
  keep(std::move(frame));
  return false;
}

void Recorder::keep(Frame&& frame) {
  history_.push_back(std::move(frame));
  if (max_frames && static_cast<int64_t>(history_.size()) > *max_frames) {
    spare_ = std::move(history_.front().entries);
    history_.pop_front();
  }
}

std::vector<Frame> Recorder::resolve() {
  std::vector<std::vector<Slot>> slots;
  for (auto& [device, device_slots] : devices_) slots.push_back(device_slots.take());
  // What the memo knows points at slots that are gone.
  memo_.clear();
  std::vector<Frame> frames;
  frames.swap(waiting_);
  for (Frame& frame : frames) {
    for (Entry& entry : frame.entries) {
      if (entry.kind != EntryKind::kTensor || entry.slot < kDeviceSlots) continue;
      entry.stat = slots[entry.slot / kDeviceSlots - 1][entry.slot % kDeviceSlots];
      frame.is_bad |= entry.is_bad();
    }
  }
  return frames;
}

void Recorder::end_step() {
  memo_.clear();
  host_slots_.clear();
}

}  // namespace overflow_fast
