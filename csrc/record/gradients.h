// Watches the gradients of outputs. A hook on the autograd node of an output reads the gradient
// that arrives there and passes it on unchanged: the graph and in-place writes behave as without
// it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "labels.h"

namespace overflow_fast {

class Recorder;

// The hooks' link to the recorder. Nodes of autograd's graph hold it and may outlive the recorder.
struct GradientSink {
  Recorder* recorder;  // null if it is gone or gradients are not wanted; read under the GIL
};

// Records the gradient of `output` as a frame of `module` when backward computes it, unless a hook
// of the same sink is there already: the innermost module that returned the tensor records it.
void watch_gradient(const std::shared_ptr<GradientSink>& sink, const at::Tensor& output,
                    uint32_t module, LabelId label);

}  // namespace overflow_fast
