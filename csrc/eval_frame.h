// torch.compile looks at every Python frame that begins while code that it compiled runs. While a
// pause lives it leaves them alone.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

class EvalFramePause {
 public:
  EvalFramePause() : before_(setter()(pybind11::none())) {}
  EvalFramePause(const EvalFramePause&) = delete;
  ~EvalFramePause() {
    const pybind11::error_scope scope;  // the call's own exception stays
    try {
      setter()(before_);
    } catch (pybind11::error_already_set& error) {
      error.discard_as_unraisable("overflow_fast: torch.compile stays paused");
    }
  }

 private:
  static const pybind11::object& setter() {
    static const auto* function =  // never freed: the interpreter may be gone by then
        new pybind11::object(
            pybind11::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame"));
    return *function;
  }

  pybind11::object before_;
};

}  // namespace overflow_fast
