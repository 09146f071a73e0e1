// The end of a step on a device: its slots are folded into flags, copied to the host and reset.
//
// Everything is queued on the current stream; see variants.h for the ways to do it.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "../scan/device.h"
#include "../scan/variants.h"

namespace overflow_fast {

namespace py = pybind11;

// Slots of one allocation.
constexpr int64_t kChunk = 4096;

// Makes slots of shape [n, 4] empty.
void reset_slots(at::Tensor& slots);

// Slots on their way to the host.
class Transfer {
 public:
  bool has_arrived();
  // Incurs the sync, unless the slots have arrived. Call without the GIL.
  void wait();
  const Slot& slot(int64_t index) const { return slots_[index / kChunk][index % kChunk]; }
  // An event that was recorded behind everything that was queued for it.
  void follow(std::shared_ptr<DeviceEvent> event);
  // Why nothing arrived, or null.
  py::object error;

 private:
  friend class DeviceSlots;
  friend class StepEnder;
  int64_t count_ = 0;
  std::vector<at::Tensor> host_;  // one for each chunk
  std::vector<const Slot*> slots_;
  uint64_t* epoch_ = nullptr;  // in host_: becomes number_ when published slots are there
  uint64_t number_ = 0;
  std::shared_ptr<DeviceEvent> event_;
};

class StepEnder {
 public:
  StepEnder(at::Device device, Device* api)
      : device_(device),
        api_(api),
        way_(api == nullptr ? StepEnd::kTorch : read_variants().step_end) {}

  // Queues it for the first transfer.count_ slots of `chunks`. With `masks`, also folds them into
  // the flags: masks[row * n + i] says what of slot i of the n counts for flag `row`: which kinds
  // of non-finite values, as bits of Slot.
  void queue(const std::vector<at::Tensor>& chunks, const std::vector<int64_t>& masks,
             Transfer& transfer);
  // On the device, float32 [kNumFlags]: 1 where something that counts was bad since the last call.
  // Undefined if nothing was folded.
  at::Tensor take_flags() { return std::exchange(flags_, {}); }
  // Gives a transfer's memory back for later ones.
  void recycle(Transfer&& transfer);

 private:
  bool is_published() const { return way_ == StepEnd::kMapped; }
  void queue_by_torch(at::Tensor& slots, const at::Tensor& masks);
  void fold_flags(const at::Tensor& slots, const at::Tensor& masks);
  void launch(at::Tensor& slots, const at::Tensor& masks, const Transfer& transfer);
  at::Tensor masks_here(const std::vector<int64_t>& masks);
  at::Tensor host_buffer();
  void keep_until_written(at::Tensor& host) const;

  at::Device device_;
  Device* api_;  // null: torch operations do it, and every copy waits
  StepEnd way_;
  at::Tensor flags_;
  std::vector<int64_t> masks_;  // the ones that are on the device
  at::Tensor device_masks_;
  std::vector<at::Tensor> spare_;
};

}  // namespace overflow_fast
