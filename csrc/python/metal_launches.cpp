#include "metal_launches.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "../scan/mps/work_list.h"
#include "../scan/tensor_view.h"

namespace overflow_fast {

namespace py = pybind11;

namespace {

// One dispatch: `count` tensors from `first` on.
struct MetalLaunch {
  size_t first;
  int64_t count;
  std::vector<int64_t> words;
  int64_t num_threads;
};

struct MetalPlan {
  std::vector<MetalLaunch> launches;
  std::vector<size_t> others;  // the kernel cannot read them
};

MetalLaunch launch_of(size_t first, const mps::WorkList& list) {
  const auto words = list.words();
  return {first,
          static_cast<int64_t>(list.num_items()),
          {words.begin(), words.end()},
          static_cast<int64_t>(list.num_blocks()) * mps::kThreads};
}

// The dispatches that scan `tensors`.
MetalPlan metal_launches(const std::vector<at::Tensor>& tensors) {
  MetalPlan plan;
  size_t first = 0;
  mps::WorkList list;
  for (size_t i = 0; i < tensors.size(); ++i) {
    mps::BufferView each{};
    if (view_of(tensors[i], each.view) != Readability::kReadable) {
      throw py::type_error("tensors must be strided and of a dtype that can be scanned, got " +
                           tensors[i].toString());
    }
    each.offset = tensors[i].storage_offset() * static_cast<int64_t>(tensors[i].itemsize());
    if (!mps::is_readable(each)) plan.others.push_back(i);
    if (list.add(each)) continue;
    plan.launches.push_back(launch_of(first, list));
    first = i;
    list = mps::WorkList();
    list.add(each);  // there is room for any one
  }
  if (list.num_items() != 0) plan.launches.push_back(launch_of(first, list));
  return plan;
}

}  // namespace

void add_metal(py::module_& m) {
  py::class_<MetalLaunch>(m, "MetalLaunch")
      .def_readonly("first", &MetalLaunch::first)
      .def_readonly("count", &MetalLaunch::count)
      .def_readonly("words", &MetalLaunch::words)
      .def_readonly("num_threads", &MetalLaunch::num_threads);
  py::class_<MetalPlan>(m, "MetalPlan")
      .def_readonly("launches", &MetalPlan::launches)
      .def_readonly("others", &MetalPlan::others);
  m.def("metal_launches", &metal_launches);
  m.attr("METAL_THREADS") = mps::kThreads;
  m.attr("METAL_MAX_TENSORS") = mps::kMaxItems;
}

}  // namespace overflow_fast
