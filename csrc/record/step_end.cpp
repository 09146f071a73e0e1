#include "step_end.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "../torch_internals/errors.h"

namespace overflow_fast {

namespace {

// True if torch has pinned memory for the device.
bool has_pinned_memory(at::Device device) {
  try {
    const c10::InferenceMode normal(false);
    return at::getAccelerator(false) == device.type() &&
           at::empty({1}, at::TensorOptions().pinned_memory(true)).is_pinned();
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

void reset_slots(at::Tensor& slots) {
  slots.zero_();
  slots.select(1, 0).fill_(-1);
}

at::Tensor on_host(at::IntArrayRef sizes, bool is_pinned) {
  const c10::InferenceMode normal(false);
  return at::empty(sizes, at::TensorOptions().dtype(at::kLong).pinned_memory(is_pinned));
}

void keep_for_ever(const std::vector<at::Tensor>& tensors) {
  static auto* kept = new std::vector<at::Tensor>;
  kept->insert(kept->end(), tensors.begin(), tensors.end());
}

Transfer::~Transfer() {
  if (!error) return;
  keep_for_ever(host_);
  keep_for_ever(kept_);
}

bool Transfer::has_arrived() {
  try {
    return !event_ || event_->has_passed();
  } catch (...) {
    note_lost();
    return true;
  }
}

void Transfer::wait() {
  if (!event_) return;
  try {
    event_->wait();
  } catch (...) {
    note_lost();
  }
}

void Transfer::note_lost() {
  const py::gil_scoped_acquire gil;
  error = current_exception_text();
  lost = std::current_exception();
  // It is not taken for another step's.
  static auto* events = new std::vector<std::shared_ptr<DeviceEvent>>;
  events->push_back(std::exchange(event_, nullptr));
}

void Transfer::follow(std::shared_ptr<DeviceEvent> event) {
  if (num_waits_ != 0) return;  // everything has arrived
  event_ = std::move(event);
  if (epoch_ != nullptr) event_->poll(epoch_, number_);
}

void Transfer::keep(std::vector<at::Tensor> tensors) {
  for (at::Tensor& each : tensors) kept_.push_back(std::move(each));
}

StepEnder::StepEnder(at::Device device, Device* api, bool has_streams)
    : device_(device),
      api_(api),
      way_(api == nullptr ? StepEnd::kTorch : read_variants().step_end),
      is_pinned_(!device.is_cpu() &&
                 (api != nullptr || (has_streams && has_pinned_memory(device)))),
      never_blocks_(api != nullptr || is_pinned_) {}

void StepEnder::queue(const std::vector<at::Tensor>& chunks, const std::vector<int64_t>& flag_bits,
                      Transfer& transfer) {
  const at::Tensor all_bits =
      flag_bits.empty() ? at::Tensor() : flag_bits_here(flag_bits, transfer);
  for (int64_t begin = 0; begin < transfer.count_; begin += kChunk) {
    const int64_t count = std::min(kChunk, transfer.count_ - begin);
    at::Tensor slots = chunks[begin / kChunk].narrow(0, 0, count);
    const at::Tensor its_bits = flag_bits.empty() ? at::Tensor() : all_bits.narrow(1, begin, count);
    at::Tensor& host = transfer.host_.emplace_back(host_buffer());
    auto* arrived = static_cast<Slot*>(host.mutable_data_ptr());
    transfer.slots_.push_back(arrived);
    if (is_published()) {
      keep_until_written(host);
    } else {
      host.narrow(0, 0, count).copy_(slots, /*non_blocking=*/never_blocks_);
      transfer.num_waits_ += !never_blocks_;
    }
    if (is_published() && begin + count == transfer.count_) {
      transfer.epoch_ = reinterpret_cast<uint64_t*>(arrived + kChunk);  // see host_buffer()
      transfer.number_ = *transfer.epoch_ + 1;
    }
    way_ == StepEnd::kTorch ? queue_by_torch(slots, its_bits) : launch(slots, its_bits, transfer);
  }
}

void StepEnder::queue_by_torch(at::Tensor& slots, const at::Tensor& flag_bits) {
  if (flag_bits.defined()) fold_flags(slots, flag_bits);
  reset_slots(slots);
}

void StepEnder::fold_flags(const at::Tensor& slots, const at::Tensor& flag_bits) {
  const c10::InferenceMode normal(false);
  // The kinds of each slot: the two signs of inf, and nan in the bit above.
  const auto signs = static_cast<int64_t>(Slot::kPositiveInf | Slot::kNegativeInf);
  const at::Tensor infs = slots.select(1, 3).bitwise_and(signs);
  const at::Tensor nans = slots.select(1, 2).ne(0).to(at::kLong) * int64_t{Slot::kNan};
  const at::Tensor flags = (infs + nans).bitwise_and(flag_bits).ne(0).any(1).to(at::kFloat);
  flags_ = flags_.defined() ? at::maximum(flags_, flags) : flags;
}

void StepEnder::launch(at::Tensor& slots, const at::Tensor& flag_bits, const Transfer& transfer) {
  SlotsEnd end{};
  end.slots = static_cast<Slot*>(slots.mutable_data_ptr());
  end.count = slots.size(0);
  at::Tensor flags = flags_;
  if (flag_bits.defined()) {
    const c10::InferenceMode normal(false);
    end.sets_flags = !flags.defined();
    if (end.sets_flags) {
      flags = at::empty({kNumFlags}, at::TensorOptions().dtype(at::kFloat).device(device_));
    }
    end.flag_bits = flag_bits.const_data_ptr<int64_t>();
    end.flag_stride = flag_bits.stride(0);
    end.flags = flags.mutable_data_ptr<float>();
  }
  if (is_published()) end.host = static_cast<Slot*>(transfer.host_.back().mutable_data_ptr());
  end.epoch = transfer.epoch_;
  end.number = transfer.number_;
  api_->end_step(end);
  flags_ = std::move(flags);  // set by the launch
}

// Usually the same from step to step, so that nothing has to be copied to the device. The transfer
// keeps them: a later step may replace them while a kernel still reads them on another stream.
at::Tensor StepEnder::flag_bits_here(const std::vector<int64_t>& flag_bits, Transfer& transfer) {
  if (flag_bits != flag_bits_) {
    const auto columns = static_cast<int64_t>(flag_bits.size()) / kNumFlags;
    const at::Tensor host = on_host({kNumFlags, columns}, is_pinned_);
    std::copy(flag_bits.begin(), flag_bits.end(), host.mutable_data_ptr<int64_t>());
    device_flag_bits_ = host.to(device_, /*non_blocking=*/never_blocks_, /*copy=*/true);
    transfer.num_waits_ += !never_blocks_;
    transfer.keep({host});
    flag_bits_ = flag_bits;
  }
  transfer.keep({device_flag_bits_});
  return device_flag_bits_;
}

StepEnder::~StepEnder() {
  if (has_failed_) keep_for_ever(spare_);
}

// One row for each slot, and one for the number that marks their arrival.
at::Tensor StepEnder::host_buffer() {
  if (!spare_.empty()) {
    at::Tensor buffer = std::move(spare_.back());
    spare_.pop_back();
    return buffer;
  }
  at::Tensor buffer = on_host({kChunk + is_published(), 4}, is_pinned_);
  if (is_published()) buffer[kChunk].zero_();
  return buffer;
}

// Does what torch's own copies do: the memory, once freed, is not reused before the stream has got
// here.
void StepEnder::keep_until_written(at::Tensor& host) const {
  if (device_.is_cpu()) return;
  const c10::Stream stream(c10::Stream::UNSAFE, device_, api_->current_stream());
  at::getHostAllocator(device_.type())
      ->record_event(host.mutable_data_ptr(), host.storage().data_ptr().get_context(), stream);
}

void StepEnder::recycle(Transfer&& transfer) {
  has_failed_ |= static_cast<bool>(transfer.error);
  if (transfer.error) return;  // a copy into the memory may still be in flight
  for (at::Tensor& buffer : transfer.host_) spare_.push_back(std::move(buffer));
  transfer.host_.clear();
}

}  // namespace overflow_fast
