#include "metal_launches.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "../scan/mps/work_list.h"
#include "../scan/tensor_view.h"

namespace overflow_fast {

namespace py = pybind11;

namespace {

// Of one dispatch: its first tensor and their number, the words, the threads.
py::tuple launch_tuple(size_t first, const mps::WorkList& list) {
  return py::make_tuple(first, list.num_items(), list.words(), list.num_blocks() * mps::kThreads);
}

// The dispatches that scan `tensors`, and the numbers of those that the kernel cannot read.
py::tuple metal_launches(const std::vector<at::Tensor>& tensors) {
  py::list launches, others;
  size_t first = 0;
  mps::WorkList list;
  for (size_t i = 0; i < tensors.size(); ++i) {
    mps::BufferView each{};
    if (view_of(tensors[i], each.view) != Readability::kReadable) {
      throw py::type_error("tensors must be readable");
    }
    each.offset = tensors[i].storage_offset() * static_cast<int64_t>(tensors[i].itemsize());
    if (!mps::is_readable(each)) others.append(i);
    if (list.add(each)) continue;
    launches.append(launch_tuple(first, list));
    first = i;
    list = mps::WorkList();
    list.add(each);  // there is room for any one
  }
  if (list.num_items() != 0) launches.append(launch_tuple(first, list));
  return py::make_tuple(launches, others);
}

}  // namespace

void add_metal(py::module_& m) {
  m.def("metal_launches", &metal_launches);
  m.attr("METAL_THREADS") = mps::kThreads;
  m.attr("METAL_MAX_TENSORS") = mps::kMaxItems;
}

}  // namespace overflow_fast
