// What non-finite values are expected, and where: rules that Python reads for each place once.
#pragma once

#include <unordered_map>

#include "frame.h"

namespace overflow_fast {

class Rules {
 public:
  // Calls function(place) for the kinds that are expected there, as bits of
  // Slot; None for no rules. What was known of places is forgotten.
  void set(py::object function) {
    function_ = std::move(function);
    known_.clear();
  }
  bool is_empty() const { return !function_ || function_.is_none(); }

  // Tells a frame's entries what is expected of them, those that hold something non-finite as
  // far as it is known, or all of them.
  void apply(Frame& frame, const LabelTable& labels, bool to_all);

 private:
  // Labels that never repeat must not fill the memory of a long run.
  static constexpr size_t kMaxPlaces = 1 << 18;

  uint64_t allowed_at(const Frame& frame, const Listing& listing, const LabelTable& labels);

  py::object function_;
  std::unordered_map<Place, uint64_t, PlaceHash> known_;
};

}  // namespace overflow_fast
