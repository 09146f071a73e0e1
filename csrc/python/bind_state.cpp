// What a step reads of each weight and of each table of a model, in one pass without Python code.
#include "bind_state.h"

#include <algorithm>
#include <string>

#include "../scan/tensor_view.h"
#include "../torch_internals/python_tensor.h"
#include "../torch_internals/tensor_state.h"

namespace overflow_fast {

namespace py = pybind11;

namespace {

const at::Tensor& checked(py::handle object) {
  if (!is_tensor(object.ptr())) throw py::type_error("tensors: expected tensors alone");
  return tensor_of(object.ptr());
}

// True if dicts hold these very values, in this order.
bool hold(const py::list& dicts, const py::list& values) {
  const Py_ssize_t size = PyList_GET_SIZE(values.ptr());
  Py_ssize_t at = 0;
  for (const py::handle dict : dicts) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict.ptr(), &position, &key, &value)) {
      if (at == size || PyList_GET_ITEM(values.ptr(), at) != value) return false;
      ++at;
    }
  }
  return at == size;
}

// The number of writes to a tensor; None for an inference tensor, which counts none.
py::object version(const py::handle& tensor) {
  const std::optional<uint32_t> found = version_of(checked(tensor));
  return found ? py::object(py::int_(*found)) : py::none();
}

// What a tensor holds, as it is now: told by its memory and its number of writes. A weak reference
// to the tensor itself would keep the program from swapping it (`torch.utils.swap_tensors`); a
// sparse one, which has no memory of its own, is referred to all the same.
class Contents {
 public:
  explicit Contents(const py::handle& tensor) : Contents(checked(tensor)) {}

  // False where that is not known, as of an inference tensor.
  bool are_in(const py::handle& other) const {
    const at::Tensor& tensor = checked(other);
    if (!version_ || version_of(tensor) != version_) return false;
    if (!tensor.has_storage()) return refers_to(sparse_, tensor);
    return has_storage(tensor, storage_) && tensor.storage_offset() == offset_ &&
           tensor.numel() == numel_;
  }

 private:
  explicit Contents(const at::Tensor& tensor) {
    version_ = version_of(tensor);
    if (!tensor.has_storage()) {
      sparse_ = weak_tensor(tensor);
      return;
    }
    storage_ = weak_storage(tensor);
    offset_ = tensor.storage_offset();
    numel_ = tensor.numel();
  }

  WeakStorage storage_{c10::intrusive_ptr<c10::StorageImpl>()};
  WeakTensor sparse_{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};  // itself
  std::optional<uint32_t> version_;
  int64_t offset_ = 0, numel_ = 0;
};

// The number of writes to each tensor; 0 for an inference tensor, which counts none.
py::list versions_of(const py::list& tensors) {
  py::list versions(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    versions[i] = py::int_(version_of(checked(tensors[i])).value_or(0));
  }
  return versions;
}

// The bytes of a few values of each tensor, evenly spaced: of about `num`. None for one whose
// memory is not on the CPU, cannot be read, or is not contiguous.
py::list samples_of(const py::list& tensors, int64_t num) {
  py::list samples(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = checked(tensors[i]);
    View view{};
    if (!tensor.is_cpu() || view_of(tensor, view) != Readability::kReadable ||
        !tensor.is_contiguous()) {
      samples[i] = py::none();
      continue;
    }
    const int64_t step = std::max<int64_t>(1, tensor.numel() / num);
    const auto size = static_cast<size_t>(tensor.itemsize());
    const auto* base = static_cast<const char*>(view.data);
    std::string bytes;
    for (int64_t place = 0; place < tensor.numel(); place += step) {
      bytes.append(base + place * size, size);
    }
    samples[i] = py::bytes(bytes);
  }
  return samples;
}

py::list require_grad(const py::list& tensors) {
  py::list answers(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    answers[i] = py::bool_(checked(tensors[i]).requires_grad());
  }
  return answers;
}

}  // namespace

void bind_state(py::module_& m) {
  m.def("hold", &hold);
  m.def("version_of", &version);
  py::class_<Contents>(m, "Contents")
      .def(py::init<const py::handle&>(), py::arg("tensor"))
      .def("are_in", &Contents::are_in, py::arg("tensor"));
  m.def("versions_of", &versions_of);
  m.def("samples_of", &samples_of);
  m.def("require_grad", &require_grad);
}

}  // namespace overflow_fast
