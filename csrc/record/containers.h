// What a value holds, by the rule of overflow_fast/tree.py: tuples, lists, deques, dicts, and the
// attributes of other objects. What is known of a type comes from there, once for each type. None
// of the user's code runs, but for what registered types and mappings without attributes say.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <vector>

#include "labels.h"

namespace overflow_fast {

// Containers that are nested deeper are not opened.
constexpr int kMaxDepth = 16;
// The values that are not plain which one walk visits: in all, and below objects, since an object
// may lead to the whole program.
constexpr int64_t kMaxValues = int64_t{1} << 20;
constexpr int64_t kMaxValuesOfObjects = int64_t{1} << 14;

enum class Shape : uint8_t {
  kTensor,
  kNone,
  kPlain,   // a number, a string: it has no parts
  kClosed,  // not opened
  kSequence,
  kDict,
  kOrderedDict,
  kDeque,
  kObject,
};

inline bool is_plain(Shape shape) { return shape == Shape::kNone || shape == Shape::kPlain; }
// Most plain values, without a look-up of their types.
inline bool is_common_plain(PyObject* value) {
  return value == Py_None || PyUnicode_CheckExact(value) || PyLong_CheckExact(value) ||
         PyFloat_CheckExact(value) || PyBool_Check(value);
}
inline bool is_container(Shape shape) { return shape >= Shape::kSequence; }

// The ways to look into the objects of a type. Refers to no class.
struct TypeLayout {
  struct Field {  // a slot
    py::object name;
    Py_ssize_t offset;
  };

  Shape shape = Shape::kClosed;
  LabelStyle key_style = LabelStyle::kKey;  // of a dict's items
  bool may_hide = true;                     // an object that is not opened may hold tensors
  // Of an object: its class declares what it holds (a dataclass, an attrs class), so that it is
  // listed like a container. Attributes of other objects are listed only if they are bad.
  bool is_declared = false;
  bool has_dict = false;
  bool is_asked = false;  // without attributes, Python code lists its parts
  py::object wraps;       // the name of the attribute whose dict's items it shows as its own
  std::vector<Field> fields;

  // True if reports give the value itself a line where it holds no tensor: it is a tensor, or a
  // container by its class.
  bool has_line() const {
    const bool is_declared_object = is_declared || wraps;
    return shape == Shape::kTensor || (shape >= Shape::kSequence && shape < Shape::kObject) ||
           (shape == Shape::kObject && is_declared_object);
  }
};

// What is known of a type. Valid while an object of the type lives.
const TypeLayout& layout_of(PyTypeObject* type);
inline const TypeLayout& layout_of(PyObject* object) { return layout_of(Py_TYPE(object)); }

// The qualified name of a type, for reports.
py::object type_name(PyTypeObject* type);

// True if a value that was not opened refers to anything but plain values.
bool hides_tensors(PyObject* value, const TypeLayout& layout);

// The parts of a container or an object.
class Parts {
 public:
  Parts(PyObject* value, const TypeLayout& layout);

  // False if the value holds nothing that can be opened.
  bool exist() const { return exist_; }
  bool are_of_object() const { return layout_.shape == Shape::kObject && !listed_; }
  // The dict whose items the value shows as its own, or null.
  PyObject* wrapped() const { return wrapped_.ptr(); }

  // Calls visit(style, key, index, child, is_declared) for each part until it returns false. The
  // key is null where there is an index. Of a container its items are declared, and not what it has
  // in attributes. With `skips_plain` it may leave out plain values.
  template <class Visit>
  void for_each(bool skips_plain, Visit visit) const;

 private:
  void find_attributes();
  void ask();
  PyObject* field(const TypeLayout::Field& field) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(value_) + field.offset);
  }
  template <class Visit>
  static bool for_each_in(PyObject* sequence, bool skips_plain, Visit visit);
  // Calls visit(key, child) for each item until it returns false, which it then returns.
  template <class Visit>
  static bool for_each_item(PyObject* dict, bool is_ordered, bool skips_plain, Visit visit);
  template <class Visit>
  bool for_each_asked(Visit visit) const;
  // Likewise for the parts of a container, without its attributes.
  template <class Visit>
  bool for_each_own(bool skips_plain, Visit visit) const;
  // True if an attribute is an item of a dict by the same name, as those of a ModelOutput are.
  bool is_item(PyObject* name, PyObject* child) const;

  PyObject* value_;
  const TypeLayout& layout_;
  bool exist_ = true;
  bool has_fields_ = false;
  py::object attributes_;  // its dict of attributes, if that is not empty
  py::object wrapped_;
  py::object listed_;  // the items of a deque; the answer of who was asked
};

template <class Visit>
bool Parts::for_each_in(PyObject* sequence, bool skips_plain, Visit visit) {
  // Large scans release the GIL, and another thread may change the list meanwhile.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
    PyObject* const item = PySequence_Fast_GET_ITEM(sequence, i);
    if (skips_plain && is_common_plain(item)) continue;
    const auto child = py::reinterpret_borrow<py::object>(item);
    if (!visit(LabelStyle::kIndex, nullptr, i, child.ptr(), true)) return false;
  }
  return true;
}

template <class Visit>
bool Parts::for_each_item(PyObject* dict, bool is_ordered, bool skips_plain, Visit visit) {
  if (!is_ordered) {
    PyObject *key, *child;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &child)) {
      if (skips_plain && is_common_plain(child)) continue;
      const auto key_alive = py::reinterpret_borrow<py::object>(key);
      const auto child_alive = py::reinterpret_borrow<py::object>(child);
      if (!visit(key, child)) return false;
    }
    return true;
  }
  const auto keys = py::reinterpret_steal<py::object>(PyODict_Type.tp_iter(dict));
  while (keys) {
    const auto key = py::reinterpret_steal<py::object>(PyIter_Next(keys.ptr()));
    if (!key) break;
    const auto child = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(dict, key.ptr()));
    if (child && !visit(key.ptr(), child.ptr())) return false;
  }
  PyErr_Clear();  // another thread has changed it
  return true;
}

template <class Visit>
bool Parts::for_each_asked(Visit visit) const {
  for (const py::handle pair : py::reinterpret_borrow<py::list>(listed_)) {
    const auto part_and_child = py::reinterpret_borrow<py::tuple>(pair);
    const auto part = part_and_child[0];
    const auto style = part.attr("style").cast<std::string_view>();
    const py::object key = part.attr("value");
    const py::object child = part_and_child[1];
    const bool goes_on =
        style == "index"
            ? visit(LabelStyle::kIndex, nullptr, key.cast<Py_ssize_t>(), child.ptr(), true)
            : visit(style == "key" ? LabelStyle::kKey : LabelStyle::kAttribute, key.ptr(), 0,
                    child.ptr(), true);
    if (!goes_on) return false;
  }
  return true;
}

template <class Visit>
bool Parts::for_each_own(bool skips_plain, Visit visit) const {
  const auto item = [&](LabelStyle style) {
    return [&visit, style](PyObject* key, PyObject* child) {
      return visit(style, key, 0, child, true);
    };
  };
  switch (layout_.shape) {
    case Shape::kSequence: return for_each_in(value_, skips_plain, visit);
    case Shape::kDeque: return for_each_in(listed_.ptr(), skips_plain, visit);
    case Shape::kDict:
    case Shape::kOrderedDict:
      return for_each_item(value_, layout_.shape == Shape::kOrderedDict, skips_plain,
                           item(layout_.key_style));
    default: break;
  }
  if (listed_) return for_each_asked(visit);
  return !wrapped_ || for_each_item(wrapped_.ptr(), PyODict_Check(wrapped_.ptr()), skips_plain,
                                    item(LabelStyle::kKey));
}

template <class Visit>
void Parts::for_each(bool skips_plain, Visit visit) const {
  if (!for_each_own(skips_plain, visit)) return;
  // Attributes beside the items of a container or a wrapper are its own business.
  const bool is_declared = layout_.is_declared && !wrapped_;
  const auto attribute = [&](PyObject* name, PyObject* child) {
    const bool is_wrapped = wrapped_ && layout_.wraps.equal(py::handle(name));
    return is_wrapped || is_item(name, child) ||
           visit(LabelStyle::kAttribute, name, 0, child, is_declared);
  };
  if (attributes_ && !for_each_item(attributes_.ptr(), false, skips_plain, attribute)) return;
  for (const TypeLayout::Field& each : layout_.fields) {
    const auto child = py::reinterpret_borrow<py::object>(field(each));
    if (child && !attribute(each.name.ptr(), child.ptr())) return;
  }
}

// The containers that a walk has opened, each held, so that no other object gets its address.
class Opened {
 public:
  Opened() = default;
  Opened(const Opened&) = delete;
  ~Opened();

  bool contains(PyObject* object) const;
  // Returns false if it is there already.
  bool add(PyObject* object);

 private:
  static constexpr size_t kFew = 16;  // most values need no allocation; chosen

  size_t place(PyObject* object) const;
  void grow();

  size_t size_ = 0;
  std::array<PyObject*, kFew> few_;
  std::vector<PyObject*> table_;  // all of them, by open addressing, where there are more
};

}  // namespace overflow_fast
