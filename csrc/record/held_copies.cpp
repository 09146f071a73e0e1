#include "held_copies.h"

#include <ATen/ATen.h>

#include <utility>

#include "../scan/torch_scan.h"

namespace overflow_fast {

bool HeldCopies::is_next(int64_t slot, int64_t stream) const {
  return stream == stream_ && slot == first_slot_ + static_cast<int64_t>(held_.size());
}

void HeldCopies::add(const at::Tensor& tensor, int64_t slot, int64_t stream) {
  const Bits bits = bits_of(tensor);
  ToReduce part{bits, {}};
  if (!is_joined(tensor) || tensor.numel() == 0) {
    part.words = words_alone(bits);
    part.each.bits.reset();
  } else {
    const at::Tensor all = flat(bits);
    // flat() has copied what does not lie together.
    part.each.bits = all.is_alias_of(tensor) ? all.clone() : all;
    bytes_ += static_cast<int64_t>(all.nbytes());
  }
  if (held_.empty()) {
    first_slot_ = slot;
    stream_ = stream;
  }
  held_.push_back({std::move(part), tensor.scalar_type()});
}

std::vector<std::string> HeldCopies::scan(const at::Tensor& slots, int64_t first) {
  const std::vector<Held> held = std::exchange(held_, {});
  bytes_ = 0;
  std::vector<std::string> why(held.size());
  const auto scan_some = [&](size_t from, size_t count) {
    std::vector<ToReduce> parts;
    for (size_t i = from; i < from + count; ++i) parts.push_back(held[i].part);
    slots.narrow(0, first + static_cast<int64_t>(from), static_cast<int64_t>(count))
        .copy_(stats_of(parts));
  };
  try {
    scan_some(0, held.size());
  } catch (...) {  // at one of them: the loop below finds which
    for (size_t i = 0; i < held.size(); ++i) {
      try {
        scan_some(i, 1);
      } catch (...) {
        why[i] = remembered_failure(slots.device().type(), held[i].dtype);
      }
    }
  }
  return why;
}

}  // namespace overflow_fast
