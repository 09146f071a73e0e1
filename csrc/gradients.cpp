#include "gradients.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "recorder.h"

namespace overflow_fast {

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

struct GradientHook : torch::autograd::FunctionPreHook {
  GradientHook(std::shared_ptr<GradientSink> sink, Node* node, uint32_t index, uint32_t module,
               LabelId label)
      : sink(std::move(sink)), node(node), index(index), module(module), label(label) {}

  variable_list operator()(const variable_list& gradients) override {
    if (gradients[index].defined()) {
      const py::gil_scoped_acquire gil;
      if (sink->recorder != nullptr) {
        sink->recorder->record_gradient(module, label, gradients[index],
                                        [this] { return region_of(node, index); });
      }
    }
    return gradients;
  }

  // Compiled autograd asks for what it needs to run it, gets nothing, and leaves it out.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    const py::gil_scoped_acquire gil;
    if (sink->recorder != nullptr) sink->recorder->note_compiled_autograd();
  }

  static Region region_of(Node* node, uint32_t index);

  std::shared_ptr<GradientSink> sink;
  Node* node;      // which holds the hook
  uint32_t index;  // which of the node's outputs
  uint32_t module;
  LabelId label;
};

const GradientHook* hook_on(Node* node, uint32_t index) {
  for (const auto& known : node->tensor_pre_hooks()) {
    const auto* hook = dynamic_cast<const GradientHook*>(known.get());
    const bool is_on = hook != nullptr && hook->index == index;
    if (is_on && hook->sink->recorder != nullptr) return hook;
  }
  return nullptr;
}

bool has_foreign_hooks(Node* node) {
  const auto& hooks = node->tensor_pre_hooks();
  return !node->pre_hooks().empty() || !node->post_hooks().empty() ||
         std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
           return dynamic_cast<const GradientHook*>(hook.get()) == nullptr;
         });
}

// Walks from a gradient to what gave it its parts, up to gradients that were looked at. The nodes
// are alive: who called backward holds the first, and each holds the next.
class RegionWalk {
 public:
  Region from(Node* node, uint32_t index) {
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    if (nodes == nullptr || nodes->empty()) return {};
    for (Node* giver : *nodes) {
      for (const auto& edge : giver->next_edges()) {
        if (edge.is_valid()) givers_[edge.function.get()].emplace_back(giver, edge.input_nr);
      }
    }
    region_.is_known = true;
    region_.has_foreign_hooks = has_foreign_hooks(node);
    enter(node, index, nullptr);
    for (size_t at = 0; at < found_.size(); ++at) expand(at);
    return std::move(region_);
  }

 private:
  // Adds those who give a node's output its gradient; `consumers` are to list them.
  void enter(Node* node, uint32_t index, std::vector<size_t>* consumers) {
    bool is_given = false;
    for (const auto& [giver, nr] : givers_[node]) {
      if (nr != index) continue;
      is_given = true;
      const size_t place = place_of(giver);
      if (consumers != nullptr) consumers->push_back(place);
    }
    region_.reaches_root |= !is_given;
  }

  size_t place_of(Node* node) {
    const auto [known, is_new] = places_.try_emplace(node, found_.size());
    if (is_new) {
      found_.push_back(node);
      region_.nodes.push_back(
          {node->name(), node->thread_id(), node->sequence_nr(), {}, {}, has_foreign_hooks(node)});
    }
    return known->second;
  }

  void expand(size_t at) {
    Node* node = found_[at];
    std::unordered_set<uint32_t> indices;
    for (const auto& [_, nr] : givers_[node]) indices.insert(nr);
    if (indices.empty()) indices.insert(0);  // backward begins here
    std::vector<size_t> consumers;
    for (const uint32_t index : indices) {
      if (const auto* hook = hook_on(node, index)) {
        region_.nodes[at].outputs.emplace_back(hook->sink->recorder, hook->module);
      } else {
        enter(node, index, &consumers);
      }
    }
    region_.nodes[at].consumers = std::move(consumers);
  }

  std::unordered_map<Node*, std::vector<std::pair<Node*, uint32_t>>> givers_;
  std::unordered_map<Node*, size_t> places_;
  std::vector<Node*> found_;
  Region region_;
};

Region GradientHook::region_of(Node* node, uint32_t index) {
  return RegionWalk().from(node, index);
}

}  // namespace

void watch_gradient(const std::shared_ptr<GradientSink>& sink, const at::Tensor& output,
                    uint32_t module, LabelId label) {
  const auto& node = output.grad_fn();
  if (!node) return;
  const auto index = static_cast<uint32_t>(output.output_nr());
  auto& hooks = node->tensor_pre_hooks();
  const bool is_watched = std::any_of(hooks.begin(), hooks.end(), [&](const auto& known) {
    const auto* hook = dynamic_cast<const GradientHook*>(known.get());
    return hook != nullptr && hook->sink == sink && hook->index == index;
  });
  if (is_watched) return;
  node->add_tensor_pre_hook(std::make_unique<GradientHook>(sink, node.get(), index, module, label));
}

}  // namespace overflow_fast
