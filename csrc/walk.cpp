#include "walk.h"

#include "torch_internals/modules.h"
#include "torch_internals/python_tensor.h"

namespace overflow_fast {

namespace {

// Deeper containers are not opened.
constexpr int kMaxDepth = 16;
// Nor more than so many children in a walk: containers may hold others many times over.
constexpr int kMaxChildren = 1 << 20;

enum class Shape : uint8_t { kTensor, kNone, kSequence, kDict, kAttributes, kLeaf };

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

// Dataclasses have their fields as attributes; one that is also a dict (ModelOutput) leaves out
// the fields that are None, so its items are what counts.
bool is_dataclass(PyObject* object) {
  static PyObject* const kFields = interned("__dataclass_fields__");
  return class_attribute(Py_TYPE(object), kFields) != nullptr;
}

Shape shape_of(PyObject* object) {
  // The plain cases first: asking whether any other object is a tensor is an isinstance().
  if (is_plain_tensor(object)) return Shape::kTensor;
  if (object == Py_None) return Shape::kNone;
  if (PyTuple_Check(object) || PyList_Check(object)) return Shape::kSequence;
  if (PyLong_CheckExact(object) || PyFloat_CheckExact(object) || PyBool_Check(object) ||
      PyUnicode_CheckExact(object)) {
    return Shape::kLeaf;
  }
  if (is_tensor(object)) return Shape::kTensor;
  if (PyDict_Check(object)) return Shape::kDict;
  if (!PyType_Check(object) && is_dataclass(object)) return Shape::kAttributes;
  return Shape::kLeaf;
}

// Calls visit(style, key, index, child) for each child of a container. None of the user's code
// runs, but for properties in the place of a dataclass's fields.
template <class Visit>
void for_each_child(PyObject* object, Shape shape, Visit visit_borrowed) {
  // Large scans let go of the GIL, and another thread may drop the child meanwhile.
  const auto visit = [&](LabelStyle style, PyObject* key, Py_ssize_t index, PyObject* child) {
    const auto alive = py::reinterpret_borrow<py::object>(child);
    visit_borrowed(style, key, index, child);
  };
  if (shape == Shape::kSequence) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      visit(LabelStyle::kIndex, nullptr, i, PySequence_Fast_GET_ITEM(object, i));
    }
  } else if (shape == Shape::kDict) {
    const bool is_model_output = !PyDict_CheckExact(object) && is_dataclass(object);
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value)) {
      visit(is_model_output ? LabelStyle::kAttribute : LabelStyle::kKey, key, 0, value);
    }
  } else if (shape == Shape::kAttributes) {
    const auto fields =
        py::handle(reinterpret_cast<PyObject*>(Py_TYPE(object))).attr("__dataclass_fields__");
    for (const auto& name : py::reinterpret_borrow<py::dict>(fields)) {
      const auto value =
          py::reinterpret_steal<py::object>(PyObject_GenericGetAttr(object, name.first.ptr()));
      if (!value) {
        PyErr_Clear();
        continue;
      }
      visit(LabelStyle::kAttribute, name.first.ptr(), 0, value.ptr());
    }
  }
}

bool is_container(Shape shape) {
  return shape == Shape::kSequence || shape == Shape::kDict || shape == Shape::kAttributes;
}

enum class Content : uint8_t { kNoTensor, kTooMuch, kTensor };

// What is opened, from the outermost container in.
class Opened {
 public:
  // visit(style, key, index, child) for each child, but for what the container is itself within:
  // that is being walked already. kTooMuch where there is no end.
  template <class Visit>
  Content open(PyObject* object, Shape shape, Visit visit) {
    if (std::find(path_.begin(), path_.end(), object) != path_.end()) return Content::kNoTensor;
    bool is_over = false;
    path_.push_back(object);
    for_each_child(object, shape,
                   [&](LabelStyle style, PyObject* key, Py_ssize_t index, PyObject* child) {
                     is_over = is_over || ++num_children_ > kMaxChildren;
                     if (!is_over) visit(style, key, index, child);
                   });
    path_.pop_back();
    return is_over ? Content::kTooMuch : Content::kNoTensor;
  }

  Content content(PyObject* object, Shape shape, int depth) {
    if (shape == Shape::kTensor) return Content::kTensor;
    if (!is_container(shape)) return Content::kNoTensor;
    if (depth > kMaxDepth) return Content::kTooMuch;
    Content found = Content::kNoTensor;
    const Content whole =
        open(object, shape, [&](LabelStyle, PyObject*, Py_ssize_t, PyObject* child) {
          if (found != Content::kTensor) {
            found = std::max(found, content(child, shape_of(child), depth + 1));
          }
        });
    return std::max(found, whole);
  }

 private:
  std::vector<PyObject*> path_;
  int num_children_ = 0;
};

struct Walker {
  Recorder& recorder;
  Frame& frame;
  Opened& opened;
  // For inputs that transformers never looks at: listed only when bad, and an additive mask's
  // -inf is no alarm there.
  bool only_if_bad;
  uint64_t allowed;  // see Listing
  bool is_input;

  void tensor(PyObject* object, LabelId label) {
    const at::Tensor& tensor = tensor_of(object);
    recorder.add_tensor(frame, {label, only_if_bad, allowed}, tensor);
    if (!is_input) recorder.watch_output(frame, label, tensor);
  }

  void value(PyObject* object, LabelId label, int depth) {
    const Shape shape = shape_of(object);
    if (shape == Shape::kTensor) return tensor(object, label);
    if (contents(object, shape, label, depth) || only_if_bad) return;
    if (shape == Shape::kNone) return recorder.add_none(frame, {label});
    recorder.add_not_tensor(frame, {label});
  }

  // Lists what a container holds. False if there is no tensor in it.
  bool contents(PyObject* object, Shape shape, LabelId label, int depth) {
    const Content content = opened.content(object, shape, depth);
    if (content == Content::kNoTensor) return false;
    Content rest = content;
    if (content == Content::kTensor) {
      rest = opened.open(
          object, shape, [&](LabelStyle style, PyObject* key, Py_ssize_t index, PyObject* child) {
            LabelTable& labels = recorder.labels();
            const bool is_item = style == LabelStyle::kIndex;
            value(child, is_item ? labels.index(label, index) : labels.key(label, style, key),
                  depth + 1);
          });
    }
    if (rest == Content::kTooMuch) {
      recorder.add_not_scanned(frame, {label, only_if_bad},
                               py::str("nested too deep, or too many values"));
    }
    return true;
  }

  // As transformers does it: a tensor, None, or not a tensor.
  void flat(PyObject* object, LabelId label) {
    const Shape shape = shape_of(object);
    if (shape == Shape::kTensor) return tensor(object, label);
    if (shape == Shape::kNone) return recorder.add_none(frame, {label});
    recorder.add_not_tensor(frame, {label});
  }
};

// A module may name its parameters itself (named_parameters overridden).
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
    recorder.add_tensor(frame, {recorder.labels().name(name)}, tensor);
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
  const Options& options = recorder.options();
  LabelTable& labels = recorder.labels();
  Opened opened;
  Walker listed{recorder, frame, opened, false, options.gathers ? Slot::kNegativeInf : 0, true};
  Walker quiet{recorder, frame, opened, !options.list_kwargs, Slot::kNegativeInf, true};
  if (!PyTuple_Check(args)) {
    listed.flat(args, kInputLabel);
  } else {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
      PyObject* input = PyTuple_GET_ITEM(args, i);
      const LabelId label = labels.index(kInputLabel, i);
      listed.flat(input, label);
      if (options.strict_compat) continue;
      const Shape shape = shape_of(input);
      if (is_container(shape)) quiet.contents(input, shape, label, 1);
    }
  }
  if (options.strict_compat || kwargs == nullptr || !PyDict_Check(kwargs)) return;
  PyObject *name, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(kwargs, &position, &name, &value)) {
    const Shape shape = shape_of(value);
    if (shape != Shape::kTensor && !is_container(shape)) continue;
    quiet.value(value, labels.key(kInputLabel, LabelStyle::kAttribute, name), 1);
  }
}

void record_outputs(Recorder& recorder, Frame& frame, PyObject* output) {
  Opened opened;
  Walker walker{recorder, frame, opened, false, 0, false};
  LabelTable& labels = recorder.labels();
  const bool is_strict = recorder.options().strict_compat;
  if (!PyTuple_Check(output)) {
    is_strict ? walker.flat(output, kOutputLabel) : walker.value(output, kOutputLabel, 1);
    return;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(output); ++i) {
    PyObject* part = PyTuple_GET_ITEM(output, i);
    const LabelId label = labels.index(kOutputLabel, i);
    if (!PyTuple_Check(part)) {
      is_strict ? walker.flat(part, label) : walker.value(part, label, 2);
      continue;
    }
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(part); ++j) {
      PyObject* inner = PyTuple_GET_ITEM(part, j);
      const LabelId inner_label = labels.index(label, j);
      is_strict ? walker.flat(inner, inner_label) : walker.value(inner, inner_label, 3);
    }
  }
}

}  // namespace overflow_fast
