#include "callbacks.h"

namespace overflow_fast {

namespace {

Callbacks& registered() {
  static auto* const callbacks = new Callbacks;  // never freed: the interpreter may be gone by then
  return *callbacks;
}

}  // namespace

const Callbacks& callbacks() { return registered(); }

void bind_callbacks(py::module_& m) {
  m.def(
      "set_callbacks",
      [](py::function resolve, py::function reason, py::function warn_of_no_kernels,
         py::function warn_of_unused_kernels, py::function warn_of_lack, py::function layout,
         py::function children, py::function type_name) {
        registered() = {std::move(resolve),
                        std::move(reason),
                        std::move(warn_of_no_kernels),
                        std::move(warn_of_unused_kernels),
                        std::move(warn_of_lack),
                        std::move(layout),
                        std::move(children),
                        std::move(type_name)};
      },
      py::kw_only(), py::arg("resolve"), py::arg("reason"), py::arg("warn_of_no_kernels"),
      py::arg("warn_of_unused_kernels"), py::arg("warn_of_lack"), py::arg("layout"),
      py::arg("children"), py::arg("type_name"));
}

}  // namespace overflow_fast
