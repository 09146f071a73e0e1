#include "gradients.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>

#include "recorder.h"

namespace overflow_fast {

namespace {

using torch::autograd::variable_list;

struct GradientHook : torch::autograd::FunctionPreHook {
  GradientHook(std::shared_ptr<GradientSink> sink, uint32_t index, uint32_t module, LabelId label)
      : sink(std::move(sink)), index(index), module(module), label(label) {}

  variable_list operator()(const variable_list& gradients) override {
    if (gradients[index].defined()) {
      const py::gil_scoped_acquire gil;
      if (sink->recorder != nullptr) {
        sink->recorder->record_gradient(module, label, gradients[index]);
      }
    }
    return gradients;
  }

  // Compiled autograd asks for what it needs to run it, gets nothing, and leaves it out.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    const py::gil_scoped_acquire gil;
    if (sink->recorder != nullptr) sink->recorder->note_compiled_autograd();
  }

  std::shared_ptr<GradientSink> sink;
  uint32_t index;  // which of the node's outputs
  uint32_t module;
  LabelId label;
};

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
  node->add_tensor_pre_hook(std::make_unique<GradientHook>(sink, index, module, label));
}

}  // namespace overflow_fast
