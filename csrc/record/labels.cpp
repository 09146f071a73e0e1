#include "labels.h"

#include <algorithm>

namespace overflow_fast {

namespace {

// A text, a number, or a tuple of them, as tree.plain_key() has it.
bool is_plain_key(PyObject* key) {
  if (!PyTuple_CheckExact(key)) return PyUnicode_CheckExact(key) || PyLong_CheckExact(key);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i) {
    PyObject* const item = PyTuple_GET_ITEM(key, i);
    if (!PyUnicode_CheckExact(item) && !PyLong_CheckExact(item)) return false;
  }
  return true;
}

}  // namespace

LabelTable::LabelTable() {
  add(kNoParent, LabelStyle::kName, Role::kInput, py::str("input"));
  add(kNoParent, LabelStyle::kName, Role::kOutput, py::str("output"));
  add(kNoParent, LabelStyle::kName, Role::kWeight, py::str("parameters"));
}

LabelId LabelTable::add(LabelId parent, LabelStyle style, Role role, py::object value) {
  nodes_.push_back({parent, style, role, std::move(value)});
  by_index_.emplace_back();
  return static_cast<LabelId>(nodes_.size() - 1);
}

LabelId LabelTable::index(LabelId parent, int64_t index) {
  const auto at = static_cast<size_t>(index);
  if (at < by_index_[parent].size() && by_index_[parent][at] != 0) {
    return by_index_[parent][at] - 1;
  }
  if (nodes_.size() >= kMaxLabels) return parent;
  const LabelId id = add(parent, LabelStyle::kIndex, role(parent), py::int_(index));
  auto& known = by_index_[parent];
  if (known.size() <= at) known.resize(at + 1);
  known[at] = id + 1;
  return id;
}

LabelId LabelTable::key(LabelId parent, LabelStyle style, PyObject* key) {
  const auto found = by_pointer_.find({parent, key});
  if (found != by_pointer_.end()) return found->second;
  // Other keys may be mutable or keep tensors alive: the name of their type replaces them.
  const bool is_plain = is_plain_key(key);
  py::object value =
      is_plain ? py::reinterpret_borrow<py::object>(key)
               : py::str("<") + py::str(py::type::handle_of(key).attr("__name__")) + py::str(">");
  const py::tuple by_value = py::make_tuple(parent, static_cast<int>(style), value);
  if (by_value_.contains(by_value)) return by_value_[by_value].cast<LabelId>();
  const bool is_name = parent == kNoParent;
  if (nodes_.size() >= (is_name ? kMaxNames : kMaxLabels))
    return is_name ? kParametersLabel : parent;
  const LabelId id = add(parent, style, is_name ? Role::kWeight : role(parent), std::move(value));
  by_value_[by_value] = id;
  // The node holds the key, so no other object gets its address.
  if (is_plain) by_pointer_.emplace(PointerKey{parent, key}, id);
  return id;
}

Label LabelTable::label(LabelId id, Role role) const {
  Label label{role, {}, {}};
  for (; nodes_[id].parent != kNoParent; id = nodes_[id].parent) {
    label.parts.push_back({nodes_[id].style, nodes_[id].value});
  }
  std::reverse(label.parts.begin(), label.parts.end());
  label.name = nodes_[id].value;
  return label;
}

bool Label::operator==(const Label& other) const {
  const auto is_same = [](const LabelPart& a, const LabelPart& b) {
    return a.style == b.style && a.value.equal(b.value);
  };
  return role == other.role && name.equal(other.name) &&
         std::equal(parts.begin(), parts.end(), other.parts.begin(), other.parts.end(), is_same);
}

}  // namespace overflow_fast
