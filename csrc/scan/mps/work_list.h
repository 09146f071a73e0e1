// The parameters of one dispatch of MPS's kernel (overflow_fast/scanner/metal/scan.metal) besides its
// tensors: where the elements of each lie, and which threadgroups read them. Free of torch.
#pragma once

#include <cstdint>
#include <vector>

#include "../layout.h"

namespace overflow_fast::mps {

constexpr int64_t kThreads = 256;  // of a threadgroup
constexpr int64_t kItemWords = 8;
constexpr int64_t kMaxItems = 24;  // buffers of a kernel, less those of slots and words
// Metal takes 4 KiB of a kernel's parameter by value.
constexpr int64_t kMaxWords = 512;
// Units for one threadgroup: 64 KiB of a dense tensor. Not measured on a Mac.
constexpr int64_t kUnitsPerBlock = kThreads * 64;

// A view in a buffer whose start is aligned to 16 bytes.
struct BufferView {
  View view;
  int64_t offset;  // bytes from the buffer's start
};

// False for a view that the kernel cannot read.
inline bool is_readable(const BufferView& each) {
  const DtypeInfo& info = dtype_info(each.view.dtype);
  return each.view.dtype != Dtype::kComplex128 && each.offset % info.key_bytes == 0;
}

class WorkList {
 public:
  // Adds a view, or returns false if there is no room for it. A view that the kernel cannot read
  // takes a place, but no threadgroup reads it.
  bool add(const BufferView& each) {
    const Layout layout(each.view);
    const bool is_run = layout.is_one_run();
    const auto num_dims = is_run ? 0 : static_cast<int64_t>(layout.dims().size());
    const auto used = static_cast<int64_t>(dims_.size()) + kItemWords * (num_items_ + 1) + 1;
    if (num_items_ == kMaxItems || used + 2 * num_dims > kMaxWords) return false;
    const DtypeInfo& info = dtype_info(each.view.dtype);
    int64_t num_units = is_readable(each) ? layout.numel() : 0;
    int64_t head = 0, tail = 0;
    const bool is_words = is_run && !info.is_complex() && info.itemsize <= 4 && num_units != 0;
    if (is_words) {
      const int64_t per_word = 4 / info.itemsize;
      head = (4 - each.offset % 4) % 4 / info.itemsize;
      head = head < num_units ? head : num_units;
      tail = (num_units - head) % per_word;
      num_units = (num_units - head) / per_word;
    }
    // One threadgroup for keys of 64 bits: see the kernel.
    const int64_t per_block = info.key_bytes == 8 ? num_units : kUnitsPerBlock;
    items_.insert(items_.end(),
                  {num_units, num_blocks_, per_block,
                   static_cast<int64_t>(info.kind) | int64_t{info.itemsize} << 8 |
                       int64_t{info.key_bytes} << 16 | num_dims << 24 |
                       static_cast<int64_t>(is_words) << 32 | head << 40 | tail << 48,
                   static_cast<int64_t>(info.inf_key), static_cast<int64_t>(info.first_nan),
                   static_cast<int64_t>(dims_.size()), 0});
    for (int64_t i = 0; i < num_dims; ++i) {
      dims_.push_back(layout.dims()[i].size);
      dims_.push_back(layout.dims()[i].stride * info.itemsize);
    }
    num_blocks_ += num_units == 0 ? head + tail != 0 : (num_units + per_block - 1) / per_block;
    ++num_items_;
    return true;
  }

  int64_t num_items() const { return num_items_; }
  int64_t num_blocks() const { return num_blocks_; }

  // The number of items, the items, the dimensions that those refer to.
  std::vector<int64_t> words() const {
    std::vector<int64_t> words{num_items_};
    words.insert(words.end(), items_.begin(), items_.end());
    const auto first_dim = static_cast<int64_t>(words.size());
    for (int64_t i = 0; i < num_items_; ++i) words[1 + kItemWords * i + 6] += first_dim;
    words.insert(words.end(), dims_.begin(), dims_.end());
    return words;
  }

 private:
  int64_t num_items_ = 0;
  int64_t num_blocks_ = 0;
  std::vector<int64_t> items_;
  std::vector<int64_t> dims_;
};

}  // namespace overflow_fast::mps
