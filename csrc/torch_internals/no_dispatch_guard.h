// Our own operations are not part of the watched program. While a NoDispatchGuard lives, autograd
// does not record them, and no mode or torch.func transform that the user has switched on sees
// them.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace overflow_fast {

struct NoDispatchGuard {
  c10::AutoGradMode no_grad{false};
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  c10::impl::ExcludeDispatchKeyGuard no_transforms{c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::FuncTorchVmapMode})};
};

}  // namespace overflow_fast
