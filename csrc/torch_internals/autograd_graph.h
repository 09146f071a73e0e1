// Autograd's graph: the node that computed a tensor, the backward that runs, and hooks on nodes.
// torch's public hooks are Python's: each costs a call of the interpreter, and they change the
// gradient function of a view.
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>

namespace overflow_fast {

// The number of the backward that runs in this thread, or -1.
inline int64_t graph_task_id() { return torch::autograd::get_current_graph_task_id(); }

// The current thread, and the number of the next node that it creates.
inline uint64_t graph_thread() { return at::RecordFunction::currentThreadId(); }
inline uint64_t next_node_number() { return at::sequence_number::peek(); }

// A node of the graph, by the thread that made it and its number there.
struct NodeId {
  uint64_t thread;
  uint64_t number;
};

// The node that computed a tensor, if one is there; Tensor::grad_fn() makes a view's anew.
inline std::optional<NodeId> node_of(const at::TensorBase& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  const auto* node = meta == nullptr ? nullptr : meta->grad_fn_.get();
  if (node == nullptr) return std::nullopt;
  return NodeId{node->thread_id(), node->sequence_nr()};
}

// The stream on which the operation ran that computed a tensor, if a node is there.
inline std::optional<c10::Stream> stream_of(const at::TensorBase& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  const auto* node = meta == nullptr ? nullptr : meta->grad_fn_.get();
  if (node == nullptr || meta->output_nr_ >= node->num_inputs()) return std::nullopt;
  return node->input_metadata(meta->output_nr_).stream();
}

// Reads the gradient of one output of a node, and passes it on unchanged.
class NodeHook : public torch::autograd::FunctionPreHook {
 public:
  explicit NodeHook(uint32_t index) : index(index) {}

  // Called for a gradient that is defined, by the thread that runs backward, without the GIL.
  virtual void observe(const at::Tensor& gradient) = 0;
  // Called where compiled autograd has left the hook out of what it compiles.
  virtual void left_out() const = 0;

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (gradients[index].defined()) observe(gradients[index]);
    return gradients;
  }
  // Compiled autograd calls this to collect the hook's arguments; it gets none and leaves the hook
  // out.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { left_out(); }

  const uint32_t index;  // which of the node's outputs
};

// Puts make(index) on the node that computed `output`, unless is_known(hook) is true for a hook of
// this kind that is there already for the same output.
template <class Hook, class IsKnown, class Make>
void hook_node_of(const at::Tensor& output, IsKnown is_known, Make make) {
  const auto& node = output.grad_fn();
  if (!node) return;
  const auto index = static_cast<uint32_t>(output.output_nr());
  auto& hooks = node->tensor_pre_hooks();
  const bool is_there = std::any_of(hooks.begin(), hooks.end(), [&](const auto& known) {
    const auto* hook = dynamic_cast<const Hook*>(known.get());
    return hook != nullptr && hook->index == index && is_known(*hook);
  });
  if (!is_there) node->add_tensor_pre_hook(make(index));
}

}  // namespace overflow_fast
