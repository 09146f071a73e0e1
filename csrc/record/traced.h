// Frames of compiled calls. torch.compile traces a module's hook into the operator
// overflow_fast::frame (overflow_fast/detector/compiled.py), which runs with the compiled code,
// where the hook would have run, and records the frame that the hook would have recorded. The
// frame's listing was determined while tracing and is a constant of the operator: an id, and a text
// that is parsed where the id is unknown (traced_text.h). Compiled code from a cache contains both.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <thread>
#include <unordered_map>
#include <vector>

#include "../torch_internals/tensor_state.h"
#include "frame.h"

namespace overflow_fast {

// A call as it was traced.
struct TracedCall {
  struct Item {
    EntryKind kind;
    Part part;
    LabelId label;
    py::object why;  // kNotScanned
    // Of a tensor: its number among all that were ever traced, or -1. The first item with a number
    // is new; later ones stand for the same tensor, not written to since.
    int64_t number;
    bool is_new;
    bool is_passed;  // the operator is given the tensor: a new one, and a known gradient
    // True if the compiled code returns the tensor and watches its gradient.
    bool is_returned;
  };
  FrameKind kind;
  py::object class_name;
  bool is_root;    // true: the root's call ends with it
  bool has_frame;  // false: its items are only counted
  bool has_loss;   // true: a loss is among the root's outputs
  std::vector<Item> items;
  std::vector<py::object> opaque;  // the types of values that were not looked into
};

// The traced calls that a recorder knows, and the entries of tensors that later frames of the same
// run of compiled code may refer to.
class Traced {
 public:
  // The call that was added under an id, or null. Its address never changes.
  const TracedCall* find_call(int64_t id) const {
    const auto found = calls_.find(id);
    return found == calls_.end() ? nullptr : &found->second;
  }
  const TracedCall& add_call(int64_t id, TracedCall&& call) {
    return calls_.emplace(id, std::move(call)).first->second;
  }

  void remember(const Frame& frame);
  // The entry of a tensor of this run, or null if its slot has been sent since.
  const Entry* find(int64_t number, int64_t num_sends) const;
  void end_step();

  // Notes a tensor that compiled code returns and whose gradient it watches itself.
  void returned(const at::Tensor& tensor);
  bool has_returned(const at::Tensor& tensor) const;

 private:
  // A program that starts a thread for each step must not fill the memory; chosen.
  static constexpr size_t kMaxThreads = 16;

  struct Known {
    Entry entry;
    int64_t sends;
  };
  // Threads may run the same code at the same time.
  using Numbered = std::unordered_map<int64_t, Known>;

  // A weak reference keeps the address of a storage from being reused.
  struct Returned {
    WeakStorage storage;
    const void* data;
    std::vector<int64_t> sizes, strides;
  };

  std::unordered_map<int64_t, TracedCall> calls_;
  std::unordered_map<std::thread::id, Numbered> known_;
  std::vector<Returned> returned_;
};

}  // namespace overflow_fast
