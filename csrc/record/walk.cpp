#include "walk.h"

#include "../torch_internals/modules.h"
#include "../torch_internals/python_tensor.h"
#include "containers.h"

namespace overflow_fast {

namespace {

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

struct Walker {
  Recorder& recorder;
  Frame& frame;
  Opened& opened;
  Part part;

  Listing listing(LabelId label) const { return recorder.listing(part, label); }

  void tensor(PyObject* object, LabelId label) {
    const at::Tensor& tensor = tensor_of(object);
    recorder.add_tensor(frame, listing(label), tensor);
    if (part == Part::kOutput) recorder.watch_output(frame, label, tensor);
  }

  void value(PyObject* object, LabelId label, int depth) {
    const Shape shape = shape_of(object);
    if (shape == Shape::kTensor) return tensor(object, label);
    if (contents(object, shape, label, depth) || listing(label).only_if_bad) return;
    flat(object, label);
  }

  // Lists the values in a container. Returns false if there is no tensor in it.
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
      recorder.add_not_scanned(frame, listing(label),
                               py::str("nested too deep, or too many values"));
    }
    return true;
  }

  // Lists a value as transformers does: a tensor, None, or not a tensor.
  void flat(PyObject* object, LabelId label) {
    const Shape shape = shape_of(object);
    if (shape == Shape::kTensor) return tensor(object, label);
    if (shape == Shape::kNone) return recorder.add_none(frame, listing(label));
    recorder.add_not_tensor(frame, listing(label));
  }
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
  const Options& options = recorder.options();
  LabelTable& labels = recorder.labels();
  Opened opened;
  Walker arguments{recorder, frame, opened, Part::kInput};
  Walker within{recorder, frame, opened, Part::kWithinInput};
  if (!PyTuple_Check(args)) {
    arguments.flat(args, kInputLabel);
  } else {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
      PyObject* input = PyTuple_GET_ITEM(args, i);
      const LabelId label = labels.index(kInputLabel, i);
      arguments.flat(input, label);
      if (options.strict_compat) continue;
      const Shape shape = shape_of(input);
      if (is_container(shape)) within.contents(input, shape, label, 1);
    }
  }
  if (options.strict_compat || kwargs == nullptr || !PyDict_Check(kwargs)) return;
  PyObject *name, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(kwargs, &position, &name, &value)) {
    const Shape shape = shape_of(value);
    if (shape != Shape::kTensor && !is_container(shape)) continue;
    within.value(value, labels.key(kInputLabel, LabelStyle::kAttribute, name), 1);
  }
}

void record_outputs(Recorder& recorder, Frame& frame, PyObject* output) {
  Opened opened;
  Walker walker{recorder, frame, opened, Part::kOutput};
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
