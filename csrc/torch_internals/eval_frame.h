// torch.compile inspects every Python frame that begins while code that it compiled runs. It does
// not while an EvalFramePause lives.
#pragma once

#include <pybind11/pybind11.h>

namespace overflow_fast {

class EvalFramePause {
 public:
  EvalFramePause() {
    if (!setter().is_none()) before_ = setter()(pybind11::none());
  }
  EvalFramePause(const EvalFramePause&) = delete;
  ~EvalFramePause() {
    if (!before_) return;
    const pybind11::error_scope scope;  // the call's own exception stays
    try {
      setter()(before_);
    } catch (pybind11::error_already_set& error) {
      error.discard_as_unraisable("overflow_fast: torch.compile stays paused");
    }
  }

 private:
  // None where torch has no such function: a line is logged, and nothing is paused.
  static const pybind11::object& setter() {
    static const auto* function =  // never freed: the interpreter may be gone by then
        new pybind11::object(find_setter());
    return *function;
  }

  static pybind11::object find_setter() {
    using pybind11::module_;
    try {
      return module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame");
    } catch (pybind11::error_already_set& error) {
      module_::import("logging")
          .attr("getLogger")("overflow_fast")
          .attr("warning")(
              "torch has changed: torch._C._dynamo.eval_frame.set_eval_frame (%s). Dynamo may "
              "compile the guard's own code.",
              error.value());
      return pybind11::none();
    }
  }

  pybind11::object before_;
};

}  // namespace overflow_fast
