// Records as Python classes: attributes to read, none to write, nothing to index.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <type_traits>

#include "../record/records.h"

namespace overflow_fast {

// Binds a class whose repr() shows all its attributes.
template <class T>
class Bound {
 public:
  Bound(py::module_& m, const char* name) : class_(m, name) {
    class_.def("__repr__", [names = names_](const py::object& self) {
      py::list shown;
      for (const auto& name : names) {
        shown.append(py::str("{}={!r}").format(name, py::getattr(self, name)));
      }
      const py::object type = py::type::of(self).attr("__name__");
      return py::str("{}({})").format(type, py::str(", ").attr("join")(shown));
    });
  }

  // `get` is a member, or a function of the object; of a Named<Record>, also of its record.
  template <class Get>
  Bound& attribute(const char* name, Get get) {
    names_.append(name);
    class_.def_property_readonly(name, [get](const T& self) {
      if constexpr (std::is_invocable_v<Get, const T&>) {
        return std::invoke(get, self);
      } else {
        return std::invoke(get, self.record);
      }
    });
    return *this;
  }
  py::class_<T>& type() { return class_; }

 private:
  py::class_<T> class_;
  py::list names_;
};

}  // namespace overflow_fast
