// The end of a step on a device: its slots are folded into flags, copied to the host and reset.
//
// Everything is queued on the current stream; see variants.h for the ways to do it.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <exception>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "../scan/device.h"
#include "../scan/variants.h"
#include "seen_memory.h"

namespace overflow_fast {

namespace py = pybind11;

// The number of slots in one allocation.
constexpr int64_t kChunk = 4096;

// Resets slots of shape [n, 4] to empty.
void reset_slots(at::Tensor& slots);

// Memory for int64s on the host.
at::Tensor on_host(at::IntArrayRef sizes, bool is_pinned);

// Never frees what a device may still write to, or what is pinned once a device has failed: freed
// then, pinned memory asks it for an event, which ends the process.
void keep_for_ever(const std::vector<at::Tensor>& tensors);

// Slots on their way to the host.
class Transfer {
 public:
  Transfer() = default;
  Transfer(Transfer&&) = default;
  ~Transfer();
  bool has_arrived();
  // Incurs a sync, unless the slots have arrived. Call without the GIL.
  void wait();
  const Slot& slot(int64_t index) const { return slots_[index / kChunk][index % kChunk]; }
  // Sets the event that was recorded after everything queued for the transfer.
  void follow(std::shared_ptr<DeviceEvent> event);
  // Keeps tensors until everything queued for the transfer is over.
  void keep(std::vector<at::Tensor> tensors);
  // How often the host has waited for the device before anything was queued.
  int64_t num_waits() const { return num_waits_; }
  // The reason why nothing arrived, or null.
  py::object error;
  // Or the same as the device has said it to a host that waited: an error of earlier work, which
  // some devices report once.
  std::exception_ptr lost;
  // All that is known of the slots if they do not arrive.
  SeenRows seen;
  // The reasons why scans of single slots did not run.
  std::map<int64_t, py::object> failures;

 private:
  friend class DeviceSlots;
  friend class StepEnder;
  void note_lost();
  int64_t count_ = 0;
  std::vector<at::Tensor> host_;  // one for each chunk
  std::vector<const Slot*> slots_;
  uint64_t* epoch_ = nullptr;  // in host_: becomes number_ once published slots have arrived
  uint64_t number_ = 0;
  std::shared_ptr<DeviceEvent> event_;
  std::vector<at::Tensor> kept_;
  int64_t num_waits_ = 0;
};

class StepEnder {
 public:
  StepEnder(at::Device device, Device* api, bool has_streams);
  ~StepEnder();

  // Queues the end of the step for the first transfer.count_ slots of `chunks`. With `flag_bits`,
  // also folds them into the flags: flag_bits[row * n + i] holds the kinds of non-finite values of
  // slot i of the n that set flag `row`, as bits of Slot.
  void queue(const std::vector<at::Tensor>& chunks, const std::vector<int64_t>& flag_bits,
             Transfer& transfer);
  // On the device, float32 [kNumFlags]: 1 where a slot has set it since the last call.
  // Undefined if nothing was folded.
  at::Tensor take_flags() { return std::exchange(flags_, {}); }
  // Keeps a transfer's memory for later ones.
  void recycle(Transfer&& transfer);
  bool is_pinned() const { return is_pinned_; }

 private:
  bool is_published() const { return way_ == StepEnd::kMapped; }
  void queue_by_torch(at::Tensor& slots, const at::Tensor& flag_bits);
  void fold_flags(const at::Tensor& slots, const at::Tensor& flag_bits);
  void launch(at::Tensor& slots, const at::Tensor& flag_bits, const Transfer& transfer);
  at::Tensor flag_bits_here(const std::vector<int64_t>& flag_bits, Transfer& transfer);
  at::Tensor host_buffer();
  void keep_until_written(at::Tensor& host) const;

  at::Device device_;
  Device* api_;  // null: torch operations do it
  StepEnd way_;
  bool is_pinned_;     // what is copied on the host
  bool never_blocks_;  // copies do not make the host wait
  at::Tensor flags_;
  std::vector<int64_t> flag_bits_;  // device_flag_bits_ on the host
  at::Tensor device_flag_bits_;
  std::vector<at::Tensor> spare_;
  bool has_failed_ = false;  // a transfer has not arrived
};

}  // namespace overflow_fast
