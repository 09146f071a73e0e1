// The walk over a strided tensor: its dimensions sorted by stride and merged, so that any dense
// permutation becomes one run and a slice becomes rows. No tensor is ever copied to be walked.
#pragma once

#include <cstddef>
#include <cstdint>

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

// Dimensions in an array of fixed size: the scan of a small tensor takes no longer than an
// allocation.
class Dims {
 public:
  static constexpr int kMax = 64;  // torch's own limit

  const Dim* begin() const { return dims_; }
  const Dim* end() const { return dims_ + size_; }
  const Dim& operator[](size_t i) const { return dims_[i]; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void clear() { size_ = 0; }

  // Keeps the dimensions sorted by stride.
  void insert(Dim dim) {
    size_t at = size_++;
    for (; at > 0 && dims_[at - 1].stride > dim.stride; --at) dims_[at] = dims_[at - 1];
    dims_[at] = dim;
  }

  // Merges dimensions that follow each other in memory.
  void merge_adjacent() {
    size_t kept = 0;
    for (size_t i = 1; i < size_; ++i) {
      Dim& inner = dims_[kept];
      if (dims_[i].stride == inner.stride * inner.size) {
        inner.size *= dims_[i].size;
      } else {
        dims_[++kept] = dims_[i];
      }
    }
    if (size_ != 0) size_ = kept + 1;
  }

 private:
  Dim dims_[kMax];
  size_t size_ = 0;
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
      // An expanded dimension repeats elements that are scanned anyway.
      if (view.sizes[i] != 1 && view.strides[i] != 0) {
        dims_.insert({view.sizes[i], view.strides[i]});
      }
    }
    dims_.merge_adjacent();
    for (const Dim& dim : dims_) numel_ *= dim.size;
  }

  // Dimensions, innermost (smallest stride) first.
  const Dims& dims() const { return dims_; }
  // The number of elements to scan: expanded dimensions count once.
  int64_t numel() const { return numel_; }
  bool is_one_run() const { return dims_.empty() || (dims_.size() == 1 && dims_[0].stride == 1); }

 private:
  Dims dims_;
  int64_t numel_ = 1;
};

}  // namespace overflow_fast
