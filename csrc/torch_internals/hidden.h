// Our own Python code calls torch functions on the tensors of the watched program. While this
// lives, no mode that the user has switched on (TorchFunctionMode, TorchDispatchMode) and no
// __torch_function__ of a tensor subclass sees them. Gradient mode stays as it is.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>

namespace overflow_fast {

class Hidden {
 public:
  Hidden() : before_(Functions::get_disabled_state()) {
    Functions::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  Hidden(const Hidden&) = delete;
  ~Hidden() { Functions::set_disabled_state(before_); }

 private:
  using Functions = at::impl::PythonTorchFunctionTLS;

  at::impl::TorchFunctionDisabledState before_;
  torch::torch_dispatch_mode::StashTorchDispatchStackGuard modes_;
};

}  // namespace overflow_fast
