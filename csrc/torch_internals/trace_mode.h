// torch.export, make_fx and AOTAutograd run a program with tensors that have no values, to record
// the operations that it calls. Anything that a hook did there would become part of the result.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace overflow_fast {

inline bool is_traced() {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PreDispatch)) return true;
  return TorchDispatchModeTLS::any_modes_set() &&
         (TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value() ||
          TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL).has_value());
}

}  // namespace overflow_fast
