// Stat as a Python type with plain members: scan() makes one for each tensor and reads it at once,
// which costs half a microsecond more with pybind11's properties.
#include <Python.h>
#include <structmember.h>

#include <cstddef>

#include "../record/records.h"

namespace overflow_fast {

namespace {

struct StatObject {
  PyObject_HEAD
  PyObject* abs_min;
  PyObject* abs_max;
  unsigned long long num_nan;
  unsigned long long num_inf;
};

PyTypeObject* stat_type = nullptr;

void destroy_stat(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  auto* self = reinterpret_cast<StatObject*>(object);
  Py_XDECREF(self->abs_min);
  Py_XDECREF(self->abs_max);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* stat_repr(PyObject* object) {
  auto* self = reinterpret_cast<StatObject*>(object);
  return PyUnicode_FromFormat("Stat(abs_min=%R, abs_max=%R, num_nan=%llu, num_inf=%llu)",
                              self->abs_min, self->abs_max, self->num_nan, self->num_inf);
}

PyMemberDef kStatMembers[] = {
    {"abs_min", T_OBJECT, offsetof(StatObject, abs_min), READONLY, nullptr},
    {"abs_max", T_OBJECT, offsetof(StatObject, abs_max), READONLY, nullptr},
    {"num_nan", T_ULONGLONG, offsetof(StatObject, num_nan), READONLY, nullptr},
    {"num_inf", T_ULONGLONG, offsetof(StatObject, num_inf), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot kStatSlots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy_stat)},
    {Py_tp_repr, reinterpret_cast<void*>(stat_repr)},
    {Py_tp_members, kStatMembers},
    {0, nullptr},
};

PyType_Spec kStatSpec = {"overflow_fast._C.Stat", sizeof(StatObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, kStatSlots};

py::object number(const Slot& slot, const DtypeInfo& info, uint64_t key) {
  if (slot.is_empty()) return py::none();
  if (info.is_integer()) return py::int_(key);
  const bool is_nan = slot.max_key >= info.first_nan && info.first_nan != kNoKey;
  return py::float_(decode_key(info, is_nan ? info.first_nan : key));
}

}  // namespace

py::object make_stat(const Slot& slot, Dtype dtype) {
  const DtypeInfo& info = dtype_info(dtype);
  auto object = py::reinterpret_steal<py::object>(stat_type->tp_alloc(stat_type, 0));
  if (!object) throw py::error_already_set();
  auto* self = reinterpret_cast<StatObject*>(object.ptr());
  self->abs_min = number(slot, info, slot.min_key).release().ptr();
  self->abs_max = number(slot, info, slot.max_key).release().ptr();
  self->num_nan = slot.num_nan;
  self->num_inf = slot.num_inf();
  return object;
}

void bind_stat(py::module_& m) {
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&kStatSpec));
  if (!type) throw py::error_already_set();
  stat_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  m.add_object("Stat", type);
}

}  // namespace overflow_fast
