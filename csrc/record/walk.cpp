#include "walk.h"

#include "../torch_internals/modules.h"
#include "../torch_internals/python_tensor.h"
#include "containers.h"

namespace overflow_fast {

namespace {

constexpr const char* kTooDeep = " (nested too deep)";
constexpr const char* kTooMany = " (behind too many values)";

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

// Where a value is: the last part of its path. Its label is interned when it is listed.
struct Spot {
  const Spot* holder;
  LabelStyle style;
  PyObject* key;
  Py_ssize_t index;
  mutable LabelId label = 0;
  mutable bool has_label = false;
};

Spot spot_at(LabelId label) { return {nullptr, LabelStyle::kName, nullptr, 0, label, true}; }

// One walk over the inputs of a call, or over its outputs. It opens each container once, so that
// cycles end.
class Walk {
 public:
  Walk(Recorder& recorder, Frame& frame) : recorder_(recorder), frame_(frame) {}

  // Marks a container as opened whose parts the caller lists.
  void open(PyObject* container) { opened_.add(container); }

  // Lists a value as transformers does: a tensor, None, or not a tensor.
  void list_flat(PyObject* value, Part part, LabelId label) {
    const Shape shape = shape_of(value);
    part_ = part;
    if (shape == Shape::kTensor) return add_tensor(value, spot_at(label), false);
    add_flat(shape == Shape::kNone, recorder_.listing(part, label));
  }

  // Lists a value, at a depth from 1 on: its tensors, or as list_flat() does if there is none.
  void list(PyObject* value, Part part, LabelId label, int depth) {
    part_ = part;
    visit(value, spot_at(label), depth, recorder_.listing(part, label).only_if_bad, false);
    list_waiting();
  }

  // Lists what is within a value.
  void list_within(PyObject* value, Part part, LabelId label, int depth) {
    if (is_plain_tensor(value) || value == Py_None) return;
    const TypeLayout& layout = layout_of(value);
    if (layout.shape == Shape::kTensor) return;
    part_ = part;
    const bool is_quiet = recorder_.listing(part, label).only_if_bad;
    look_into(value, layout, spot_at(label), depth, is_quiet, false);
    waiting_.clear();  // not empty only if there is no tensor
  }

  // Lists the attributes of a tuple whose items the caller lists.
  void list_attributes(PyObject* tuple, Part part, LabelId label, int depth) {
    if (PyTuple_CheckExact(tuple)) return;
    part_ = part;
    const Spot holder = spot_at(label);
    const Parts parts(tuple, layout_of(tuple));
    parts.for_each(true, [&](LabelStyle style, PyObject* key, Py_ssize_t index, PyObject* child,
                             bool is_declared) {
      if (is_declared || is_plain_value(child)) return true;
      visit(child, Spot{&holder, style, key, index}, depth, true, true);
      return true;
    });
  }

  // Lists a keyword argument, if it is a tensor or a container, and what is within it.
  void list_named(PyObject* value, PyObject* name) {
    if (is_plain_value(value)) return;
    const LabelId label = recorder_.labels().key(kInputLabel, LabelStyle::kAttribute, name);
    const bool has_line = is_plain_tensor(value) || layout_of(value).has_line();
    has_line ? list(value, Part::kWithinInput, label, 1)
             : list_within(value, Part::kWithinInput, label, 1);
  }

 private:
  // A value without tensors. It is listed if its container turns out to hold one elsewhere.
  struct Waiting {
    const Spot* holder;
    LabelStyle style;
    py::object key;
    Py_ssize_t index;
    LabelId label;  // without a holder
    bool is_none;
    size_t place;  // the number of the frame's entries before it
  };

  // The common cases first.
  static Shape shape_of(PyObject* value) {
    if (is_plain_tensor(value)) return Shape::kTensor;
    if (value == Py_None) return Shape::kNone;
    return layout_of(value).shape;
  }

  // `is_quiet`: what is listed is listed only if it is bad.
  void visit(PyObject* value, const Spot& spot, int depth, bool is_quiet, bool is_below_object) {
    if (is_plain_tensor(value)) return add_tensor(value, spot, is_quiet);
    if (value == Py_None) return wait(spot, true, is_quiet, frame_.entries.size());
    const TypeLayout& layout = layout_of(value);
    if (layout.shape == Shape::kTensor) return add_tensor(value, spot, is_quiet);
    const size_t place = frame_.entries.size();
    const size_t num_waiting = waiting_.size();
    if (look_into(value, layout, spot, depth, is_quiet, is_below_object)) return;
    waiting_.erase(waiting_.begin() + static_cast<int64_t>(num_waiting), waiting_.end());
    wait(spot, false, is_quiet, place);
  }

  // Visits the parts of a value, if it can be opened and was not yet. Returns true if a tensor was
  // listed whether or not it is bad.
  bool look_into(PyObject* value, const TypeLayout& layout, const Spot& spot, int depth,
                 bool is_quiet, bool is_below_object) {
    if (is_plain(layout.shape) || opened_.contains(value)) return false;
    const Parts parts(value, layout);
    if (!parts.exist()) {
      if (hides_tensors(value, layout)) note(value);
      return false;
    }
    if (depth > kMaxDepth || !is_quiet) {
      if (!has_more_than_plain(parts)) return false;
      if (depth > kMaxDepth) {
        note(value, kTooDeep);
        return false;
      }
    }
    opened_.add(value);
    if (parts.wrapped() != nullptr && !opened_.add(parts.wrapped())) return false;
    is_below_object |= parts.are_of_object();
    const int64_t before = num_listed_;
    parts.for_each(is_quiet, [&](LabelStyle style, PyObject* key, Py_ssize_t index, PyObject* child,
                                 bool is_declared) {
      const Spot there{&spot, style, key, index};
      const bool is_hushed = is_quiet || !is_declared;
      if (is_plain_value(child)) {
        wait(there, child == Py_None, is_hushed, frame_.entries.size());
        return true;
      }
      if (!spend(is_below_object)) {
        note(child, kTooMany);
        return false;
      }
      visit(child, there, depth + 1, is_hushed, is_below_object);
      return true;
    });
    const bool has_listed = num_listed_ > before;
    if (has_listed) list_waiting();  // those behind the last tensor
    return has_listed;
  }

  static bool is_plain_value(PyObject* value) {
    if (is_plain_tensor(value)) return false;
    return is_common_plain(value) || is_plain(layout_of(value).shape);
  }

  static bool has_more_than_plain(const Parts& parts) {
    bool has_more = false;
    parts.for_each(true, [&](LabelStyle, PyObject*, Py_ssize_t, PyObject* child, bool) {
      has_more |= !is_plain_value(child);
      return !has_more;
    });
    return has_more;
  }

  bool spend(bool is_below_object) {
    --num_left_;
    if (is_below_object) --num_left_below_objects_;
    return num_left_ >= 0 && (!is_below_object || num_left_below_objects_ >= 0);
  }

  // Counts a value that may hold tensors. Without `why` its type is never opened.
  void note(PyObject* value, const char* why = "") {
    recorder_.note_opaque(frame_, py::str("{}{}").format(type_name(Py_TYPE(value)), why));
  }

  LabelId label_at(const Spot* holder, LabelStyle style, PyObject* key, Py_ssize_t index) {
    LabelTable& labels = recorder_.labels();
    const LabelId above = label_of(*holder);
    return style == LabelStyle::kIndex ? labels.index(above, index) : labels.key(above, style, key);
  }

  LabelId label_of(const Spot& spot) {
    if (!spot.has_label) {
      spot.label = label_at(spot.holder, spot.style, spot.key, spot.index);
      spot.has_label = true;
    }
    return spot.label;
  }

  void add_tensor(PyObject* value, const Spot& spot, bool is_quiet) {
    if (!is_quiet) {
      list_waiting();
      ++num_listed_;
    }
    const LabelId label = label_of(spot);
    Listing listing = recorder_.listing(part_, label);
    listing.only_if_bad |= is_quiet;
    const at::Tensor& tensor = tensor_of(value);
    recorder_.add_tensor(frame_, listing, tensor);
    if (part_ == Part::kOutput && !is_quiet) recorder_.watch_output(frame_, label, tensor);
  }

  void add_flat(bool is_none, Listing listing) {
    is_none ? recorder_.add_none(frame_, listing) : recorder_.add_not_tensor(frame_, listing);
  }

  void wait(const Spot& spot, bool is_none, bool is_quiet, size_t place) {
    if (is_quiet) return;
    waiting_.push_back({spot.holder, spot.style, py::reinterpret_borrow<py::object>(spot.key),
                        spot.index, spot.label, is_none, place});
  }

  // Lists the values that wait, each in its place.
  void list_waiting() {
    for (size_t i = 0; i < waiting_.size(); ++i) {
      const Waiting& each = waiting_[i];
      const LabelId label = each.holder == nullptr
                                ? each.label
                                : label_at(each.holder, each.style, each.key.ptr(), each.index);
      add_flat(each.is_none, recorder_.listing(part_, label));
      const auto place = frame_.entries.begin() + static_cast<int64_t>(each.place + i);
      std::rotate(place, frame_.entries.end() - 1, frame_.entries.end());
    }
    waiting_.clear();
  }

  Recorder& recorder_;
  Frame& frame_;
  Part part_ = Part::kInput;
  Opened opened_;
  int64_t num_left_ = kMaxValues;
  int64_t num_left_below_objects_ = kMaxValuesOfObjects;
  int64_t num_listed_ = 0;  // tensors that are listed whether or not they are bad
  std::vector<Waiting> waiting_;
};

// True if the module's class overrides named_parameters().
bool has_own_named_parameters(PyObject* module) {
  static PyObject* const kName = interned("named_parameters");
  static PyObject* const kModuleType =
      py::object(py::module_::import("torch.nn").attr("Module")).release().ptr();
  return class_attribute(Py_TYPE(module), kName) !=
         class_attribute(reinterpret_cast<PyTypeObject*>(kModuleType), kName);
}

void record_parameter(Recorder& recorder, Frame& frame, PyObject* name, PyObject* parameter) {
  if (!is_tensor(parameter)) return;
  const at::Tensor& tensor = tensor_of(parameter);
  if (recorder.wants_parameter(tensor)) {
    const LabelId label = recorder.labels().name(name);
    recorder.add_tensor(frame, recorder.listing(Part::kNamed, label), tensor);
  }
}

}  // namespace

void record_parameters(Recorder& recorder, Frame& frame, PyObject* module) {
  if (has_own_named_parameters(module)) {
    const auto named = py::reinterpret_borrow<py::object>(module).attr("named_parameters")(
        py::arg("recurse") = false);
    for (const auto& item : named) {
      const auto pair = py::reinterpret_borrow<py::tuple>(item);
      record_parameter(recorder, frame, pair[0].ptr(), pair[1].ptr());
    }
    return;
  }
  const py::object parameters = own_parameters(module);
  if (!PyDict_Check(parameters.ptr()) || PyDict_GET_SIZE(parameters.ptr()) == 0) return;
  // named_parameters() lists a parameter that has two names once.
  std::vector<PyObject*> seen;
  PyObject *name, *parameter;
  Py_ssize_t position = 0;
  while (PyDict_Next(parameters.ptr(), &position, &name, &parameter)) {
    if (std::find(seen.begin(), seen.end(), parameter) != seen.end()) continue;
    seen.push_back(parameter);
    record_parameter(recorder, frame, name, parameter);
  }
}

void record_inputs(Recorder& recorder, Frame& frame, PyObject* args, PyObject* kwargs) {
  const bool is_strict = recorder.options().strict_compat;
  LabelTable& labels = recorder.labels();
  Walk walk(recorder, frame);
  if (!PyTuple_Check(args)) {
    walk.list_flat(args, Part::kInput, kInputLabel);
  } else {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
      PyObject* input = PyTuple_GET_ITEM(args, i);
      const LabelId label = labels.index(kInputLabel, i);
      walk.list_flat(input, Part::kInput, label);
      if (!is_strict) walk.list_within(input, Part::kWithinInput, label, 1);
    }
  }
  if (is_strict || kwargs == nullptr || !PyDict_Check(kwargs)) return;
  PyObject *name, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(kwargs, &position, &name, &value)) walk.list_named(value, name);
}

// Tuples of the outer two levels are listed at each place, also shared ones: transformers lists
// them so.
void record_outputs(Recorder& recorder, Frame& frame, PyObject* output) {
  Walk walk(recorder, frame);
  LabelTable& labels = recorder.labels();
  const auto list = [&](PyObject* value, LabelId label, int depth) {
    recorder.options().strict_compat ? walk.list_flat(value, Part::kOutput, label)
                                     : walk.list(value, Part::kOutput, label, depth);
  };
  if (!PyTuple_Check(output)) return list(output, kOutputLabel, 1);
  const auto list_attributes = [&](PyObject* tuple, LabelId label, int depth) {
    if (!recorder.options().strict_compat) walk.list_attributes(tuple, Part::kOutput, label, depth);
  };
  walk.open(output);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(output); ++i) {
    PyObject* part = PyTuple_GET_ITEM(output, i);
    const LabelId label = labels.index(kOutputLabel, i);
    if (!PyTuple_Check(part)) {
      list(part, label, 2);
      continue;
    }
    walk.open(part);
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(part); ++j) {
      list(PyTuple_GET_ITEM(part, j), labels.index(label, j), 3);
    }
    list_attributes(part, label, 3);
  }
  list_attributes(output, kOutputLabel, 2);
}

}  // namespace overflow_fast
