// Our own operations are no part of the watched program: no gradient, and nothing to be seen by
// a mode that the user has switched on.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace overflow_fast {

struct Unseen {
  c10::AutoGradMode no_grad{false};
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet(c10::DispatchKey::Python) |
      c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot)};
};

}  // namespace overflow_fast
