// The walk over a strided tensor: its dimensions sorted by stride and merged, so that any dense
// permutation becomes one run and a slice becomes rows. No tensor is ever copied to be walked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "dtype.h"

namespace overflow_fast {

// A tensor as the scan core sees it. Sizes and strides count elements and are borrowed.
struct View {
  const void* data;
  Dtype dtype;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t ndim;
};

struct Dim {
  int64_t size;
  int64_t stride;  // elements
};

class Layout {
 public:
  explicit Layout(const View& view) {
    for (int64_t i = 0; i < view.ndim; ++i) {
      if (view.sizes[i] == 0) {
        numel_ = 0;
        dims_.clear();
        return;
      }
      // An expanded dimension repeats elements that are looked at anyway.
      if (view.sizes[i] != 1 && view.strides[i] != 0) {
        dims_.push_back({view.sizes[i], view.strides[i]});
      }
    }
    std::sort(dims_.begin(), dims_.end(),
              [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
    merge_adjacent();
    for (const Dim& dim : dims_) numel_ *= dim.size;
  }

  // Dimensions, innermost (smallest stride) first.
  const std::vector<Dim>& dims() const { return dims_; }
  // Elements to look at: expanded dimensions count once.
  int64_t numel() const { return numel_; }
  bool is_one_run() const { return dims_.empty() || (dims_.size() == 1 && dims_[0].stride == 1); }

 private:
  void merge_adjacent() {
    size_t kept = 0;
    for (size_t i = 1; i < dims_.size(); ++i) {
      Dim& inner = dims_[kept];
      if (dims_[i].stride == inner.stride * inner.size) {
        inner.size *= dims_[i].size;
      } else {
        dims_[++kept] = dims_[i];
      }
    }
    if (!dims_.empty()) dims_.resize(kept + 1);
  }

  std::vector<Dim> dims_;
  int64_t numel_ = 1;
};

}  // namespace overflow_fast
