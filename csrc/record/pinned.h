// Pinned memory of the host, to which copies that do not block bring values from a device: nobody
// but the driver knows whether one has arrived. It is scanned once what was queued before has been
// waited for, and kept until then.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include "../scan/stat.h"
#include "../torch_internals/tensor_state.h"

namespace overflow_fast {

class Coverage;

class Pinned {
 public:
  explicit Pinned(const at::Tensor& tensor);

  // Under the GIL, which a large scan releases.
  void scan(Coverage& coverage);
  void scan_again();

  Slot stat;
  pybind11::object error;  // or set: why there is none

 private:
  at::Tensor memory_;
  WriteCounter writes_;
};

// True for memory that a copy from a device may still be writing.
bool is_pinned(const at::Tensor& tensor);

}  // namespace overflow_fast
