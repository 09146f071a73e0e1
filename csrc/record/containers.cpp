#include "containers.h"

#include <structmember.h>

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "../scan/callbacks.h"
#include "../torch_internals/eval_frame.h"
#include "../torch_internals/hidden.h"
#include "../torch_internals/modules.h"
#include "../torch_internals/python_tensor.h"

namespace overflow_fast {

namespace {

// Calls a Python function of the package, which may run code of others.
template <class... Arguments>
py::object asked(const py::object& function, Arguments&&... arguments) {
  const EvalFramePause pause;
  const Hidden hidden;
  return function(std::forward<Arguments>(arguments)...);
}

PyTypeObject* deque_type() {
  static auto* const type = reinterpret_cast<PyTypeObject*>(
      py::object(py::module_::import("collections").attr("deque")).release().ptr());
  return type;
}

bool declares(PyTypeObject* type) {
  static PyObject* const kOfDataclass = PyUnicode_InternFromString("__dataclass_fields__");
  static PyObject* const kOfAttrs = PyUnicode_InternFromString("__attrs_attrs__");
  return class_attribute(type, kOfDataclass) != nullptr ||
         class_attribute(type, kOfAttrs) != nullptr;
}

// Where a slot of a class lies in its objects, or -1.
Py_ssize_t offset_of(PyTypeObject* type, py::handle slot) {
  const auto name_and_place = py::reinterpret_borrow<py::tuple>(slot);
  const auto base = py::reinterpret_borrow<py::tuple>(type->tp_mro)[name_and_place[1]];
  PyObject* found = own_attribute(reinterpret_cast<PyTypeObject*>(base.ptr()),
                                  py::object(name_and_place[0]).ptr());
  if (found == nullptr || !Py_IS_TYPE(found, &PyMemberDescr_Type)) return -1;
  const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(found)->d_member;
  return member->type == T_OBJECT_EX ? member->offset : -1;
}

void examine(PyTypeObject* type, TypeLayout& layout) {
  const py::object known = asked(callbacks().layout, py::handle(reinterpret_cast<PyObject*>(type)));
  const auto is = [&](const char* name) { return known.attr(name).cast<bool>(); };
  layout.may_hide = is("may_hide");
  layout.is_asked = is("is_asked");
  layout.has_dict = is("has_dict");
  if (is("is_plain")) {
    layout.shape = type == Py_TYPE(Py_None) ? Shape::kNone : Shape::kPlain;
  } else if (is_tensor_type(type)) {
    layout.shape = Shape::kTensor;
  } else if (PyType_FastSubclass(type, Py_TPFLAGS_TUPLE_SUBCLASS | Py_TPFLAGS_LIST_SUBCLASS)) {
    layout.shape = Shape::kSequence;
  } else if (PyType_FastSubclass(type, Py_TPFLAGS_DICT_SUBCLASS)) {
    const bool is_ordered = PyType_IsSubtype(type, &PyODict_Type) != 0;
    layout.shape = is_ordered ? Shape::kOrderedDict : Shape::kDict;
    // ModelOutput leaves out the fields that are None, so its items are listed in their place.
    if (type != &PyDict_Type && declares(type)) layout.key_style = LabelStyle::kAttribute;
  } else if (PyType_IsSubtype(type, deque_type())) {
    layout.shape = Shape::kDeque;
  } else if (is("is_open")) {
    layout.shape = Shape::kObject;
    layout.is_declared = declares(type);
    if (known.attr("wraps").cast<std::string_view>() != "") layout.wraps = known.attr("wraps");
  }
  if (!is_container(layout.shape)) return;
  for (const py::handle slot : known.attr("slots")) {
    const Py_ssize_t offset = offset_of(type, slot);
    const py::object name = py::reinterpret_borrow<py::tuple>(slot)[0];
    if (offset >= 0) layout.fields.push_back({name, offset});
  }
}

// The layouts of types, by their addresses. A weak reference shows if the type at an address
// is still the one that was examined.
class Layouts {
 public:
  const TypeLayout& find(PyTypeObject* type) {
    Recent& recent = recent_[(reinterpret_cast<uintptr_t>(type) >> 4) % recent_.size()];
    if (recent.type != type || !recent.known->is_of(type)) recent = {type, &look_up(type)};
    return recent.known->layout;
  }

 private:
  static constexpr size_t kMaxDead = 1024;  // types between two looks at all of them; chosen

  struct Known {
    TypeLayout layout;
    py::object reference;
    bool is_of(PyTypeObject* type) const {
      return refers_to(reference.ptr(), reinterpret_cast<PyObject*>(type));
    }
  };
  struct Recent {
    PyTypeObject* type = nullptr;
    const Known* known = nullptr;
  };

  const Known& look_up(PyTypeObject* type) {
    const auto found = known_.find(type);
    if (found != known_.end() && found->second->is_of(type)) return *found->second;
    auto known = std::make_unique<Known>();
    known->reference = py::weakref(py::handle(reinterpret_cast<PyObject*>(type)));
    examine(type, known->layout);
    recent_.fill({});
    if (known_.size() >= next_clean_) drop_dead();
    std::unique_ptr<Known>& place = known_[type];
    // Another thread may have examined it meanwhile, and uses that.
    if (!place || !place->is_of(type)) place = std::move(known);
    return *place;
  }

  void drop_dead() {
    std::erase_if(known_, [](const auto& each) { return !each.second->is_of(each.first); });
    next_clean_ = known_.size() + kMaxDead;
  }

  std::array<Recent, 256> recent_;
  std::unordered_map<PyTypeObject*, std::unique_ptr<Known>> known_;
  size_t next_clean_ = kMaxDead;
};

// What an object refers to, as gc.get_referents() lists it.
std::vector<py::object> referents_of(PyObject* object) {
  std::vector<py::object> found;
  const traverseproc traverse = Py_TYPE(object)->tp_traverse;
  if (!PyObject_IS_GC(object) || traverse == nullptr) return found;
  const visitproc add = [](PyObject* each, void* all) {
    static_cast<std::vector<py::object>*>(all)->push_back(py::reinterpret_borrow<py::object>(each));
    return 0;
  };
  traverse(object, add, &found);
  return found;
}

}  // namespace

const TypeLayout& layout_of(PyTypeObject* type) {
  static auto* const layouts = new Layouts;  // never freed: the interpreter may be gone by then
  return layouts->find(type);
}

py::object type_name(PyTypeObject* type) {
  return asked(callbacks().type_name, py::handle(reinterpret_cast<PyObject*>(type)));
}

bool hides_tensors(PyObject* value, const TypeLayout& layout) {
  if (!layout.may_hide || layout.is_asked) return layout.may_hide;
  const std::vector<py::object> referents = referents_of(value);
  return std::any_of(referents.begin(), referents.end(), [](const py::object& each) {
    // An object without attributes refers to an empty dict.
    const bool is_empty = PyDict_CheckExact(each.ptr()) && PyDict_GET_SIZE(each.ptr()) == 0;
    return !is_empty && layout_of(each.ptr()).may_hide;
  });
}

Parts::Parts(PyObject* value, const TypeLayout& layout) : value_(value), layout_(layout) {
  if (is_container(layout.shape)) find_attributes();
  if (layout.shape == Shape::kDeque) {
    const auto items = py::reinterpret_steal<py::object>(deque_type()->tp_iter(value));
    if (items) listed_ = py::reinterpret_steal<py::object>(PySequence_List(items.ptr()));
    if (!listed_) throw py::error_already_set();
  } else if (layout.shape == Shape::kObject) {
    if (!attributes_ && !has_fields_) ask();
  } else {
    exist_ = is_container(layout.shape);
  }
}

void Parts::find_attributes() {
  if (layout_.has_dict) {
    static PyObject* const kName = PyUnicode_InternFromString("__dict__");
    // The type's own attribute, which is of C: it cannot run code of the user's.
    attributes_ = py::reinterpret_steal<py::object>(PyObject_GenericGetAttr(value_, kName));
    if (!attributes_) PyErr_Clear();
    const bool is_dict = attributes_ && PyDict_CheckExact(attributes_.ptr());
    if (!is_dict || PyDict_GET_SIZE(attributes_.ptr()) == 0) attributes_ = {};
  }
  PyObject* wrapped = nullptr;
  if (layout_.wraps && attributes_)
    wrapped = PyDict_GetItem(attributes_.ptr(), layout_.wraps.ptr());
  for (const TypeLayout::Field& each : layout_.fields) {
    if (field(each) == nullptr) continue;
    has_fields_ = true;
    if (layout_.wraps && layout_.wraps.equal(each.name)) wrapped = field(each);
  }
  if (wrapped != nullptr && PyDict_Check(wrapped)) {
    wrapped_ = py::reinterpret_borrow<py::object>(wrapped);
  }
}

bool Parts::is_item(PyObject* name, PyObject* child) const {
  const bool is_dict = layout_.shape == Shape::kDict || layout_.shape == Shape::kOrderedDict;
  return is_dict && PyDict_GetItem(value_, name) == child;  // ignores errors
}

void Parts::ask() {
  exist_ = false;
  if (!layout_.is_asked) return;
  const py::object answer = asked(callbacks().children, py::handle(value_));
  if (answer.is_none()) return;
  listed_ = answer;
  exist_ = true;
}

Opened::~Opened() {
  if (table_.empty()) {
    std::for_each(few_.begin(), few_.begin() + size_, [](PyObject* each) { Py_DECREF(each); });
  }
  for (PyObject* each : table_) Py_XDECREF(each);
}

bool Opened::contains(PyObject* object) const {
  if (!table_.empty()) return table_[place(object)] != nullptr;
  return std::find(few_.begin(), few_.begin() + size_, object) != few_.begin() + size_;
}

bool Opened::add(PyObject* object) {
  if (contains(object)) return false;
  if (table_.empty() ? size_ == kFew : 2 * size_ >= table_.size()) grow();
  (table_.empty() ? few_[size_] : table_[place(object)]) = object;
  ++size_;
  Py_INCREF(object);
  return true;
}

// The place of an object in the table, or the free one that it would have.
size_t Opened::place(PyObject* object) const {
  const size_t mask = table_.size() - 1;
  size_t at = (reinterpret_cast<uintptr_t>(object) * 0x9e3779b97f4a7c15 >> 32) & mask;
  while (table_[at] != nullptr && table_[at] != object) at = (at + 1) & mask;
  return at;
}

void Opened::grow() {
  std::vector<PyObject*> before(std::move(table_));
  if (before.empty()) before.assign(few_.begin(), few_.end());
  table_.assign(std::max<size_t>(4 * kFew, 2 * before.size()), nullptr);
  for (PyObject* each : before) {
    if (each != nullptr) table_[place(each)] = each;
  }
}

}  // namespace overflow_fast
