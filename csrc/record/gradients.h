// Watches the gradients of outputs. A hook on the autograd node of an output looks at the gradient
// that arrives there and hands it on as it is: the graph and in-place writes stay what they were.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "labels.h"

namespace overflow_fast {

class Recorder;

// Where the hooks report to. Nodes of autograd's graph hold it, which may outlive the recorder.
struct GradientSink {
  Recorder* recorder;  // null once it is gone or does not want to know; read under the GIL
};

// Records the gradient of `output` as a frame of `module` when backward computes it, unless a hook
// of the same sink is there already: the innermost module that returned the tensor has it.
void watch_gradient(const std::shared_ptr<GradientSink>& sink, const at::Tensor& output,
                    uint32_t module, LabelId label);

}  // namespace overflow_fast
