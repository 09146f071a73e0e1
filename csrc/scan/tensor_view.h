// The edge between torch and the scan core: which tensors have memory that can be read, and
// where it lies.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "layout.h"

namespace overflow_fast {

std::optional<Dtype> to_dtype(at::ScalarType type);

enum class Readability : uint8_t {
  kReadable,     // strided memory of a dtype that a scan understands
  kUnsupported,  // strided memory of another dtype
  kFreed,        // strided, but its storage is smaller than its sizes say (FSDP frees so)
  kWrapper,      // no strided memory of its own: a wrapper, sparse, nested, meta, quantized ...
};

// Classifies `tensor`, and for kReadable fills `view`, which borrows from the tensor. Neither
// synchronises nor touches the tensor's elements.
Readability view_of(const at::Tensor& tensor, View& view);

}  // namespace overflow_fast
