#include "gradients.h"

#include "../torch_internals/autograd_graph.h"
#include "recorder.h"

namespace overflow_fast {

namespace {

struct GradientHook final : NodeHook {
  GradientHook(std::shared_ptr<GradientSink> sink, uint32_t index, uint32_t module, LabelId label)
      : NodeHook(index), sink(std::move(sink)), module(module), label(label) {}

  void observe(const at::Tensor& gradient) override {
    const py::gil_scoped_acquire gil;
    if (sink->recorder != nullptr) sink->recorder->record_gradient(module, label, gradient);
  }

  void left_out() const override {
    const py::gil_scoped_acquire gil;
    if (sink->recorder != nullptr) sink->recorder->note_compiled_autograd();
  }

  std::shared_ptr<GradientSink> sink;
  uint32_t module;
  LabelId label;
};

}  // namespace

void watch_gradient(const std::shared_ptr<GradientSink>& sink, const at::Tensor& output,
                    uint32_t module, LabelId label) {
  hook_node_of<GradientHook>(
      output, [&](const GradientHook& known) { return known.sink == sink; },
      [&](uint32_t index) { return std::make_unique<GradientHook>(sink, index, module, label); });
}

}  // namespace overflow_fast
