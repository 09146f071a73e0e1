// Rules: the non-finite values that are expected at each place, from a function called once each.
#pragma once

#include <unordered_map>

#include "frame.h"

namespace overflow_fast {

class Rules {
 public:
  // Sets the function(place) that returns the kinds that are expected there, as bits of Slot; None
  // for no rules. Clears what is cached for places.
  void set(py::object function) {
    function_ = std::move(function);
    known_.clear();
  }
  bool is_empty() const { return !function_ || function_.is_none(); }

  // Allows what is expected in the entries of a frame: in all of them, or in those that are known
  // to be bad.
  void apply(Frame& frame, const LabelTable& labels, bool to_all);

 private:
  // Labels that never repeat must not fill the memory of a long run.
  static constexpr size_t kMaxPlaces = 1 << 18;

  uint64_t allowed_at(const Frame& frame, const Listing& listing, const LabelTable& labels);

  py::object function_;
  std::unordered_map<Place, uint64_t, PlaceHash> known_;
};

}  // namespace overflow_fast
