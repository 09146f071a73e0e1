// Headroom: how close values came to the largest number of their dtype. Keeps the smallest headroom
// of a step and the last finite magnitudes of each entry, which show how a value developed before
// it became non-finite.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "frame.h"

namespace overflow_fast {

class Headroom {
 public:
  struct Peak {
    Place place;
    Dtype dtype;
    uint64_t max_key;

    uint64_t limit() const { return dtype_info(dtype).first_nonfinite() - 1; }
    // About how many times its magnitude could double: keys are piecewise linear logarithms.
    double bits() const {
      return std::ldexp(static_cast<double>(limit() - max_key), -dtype_info(dtype).mantissa);
    }
  };

  // The magnitudes of one entry over the steps.
  class History {
   public:
    Peak last;         // the last finite one
    uint64_t highest;  // of all steps
    bool has_overflowed = false;
    int64_t steps_at_limit = 0;

    void add(const Peak& peak, int64_t step) {
      if (num_steps_ == 0 || peak.dtype != last.dtype) {
        num_steps_ = 0;
        highest = 0;
        has_overflowed = false;
      }
      if (num_steps_ == 0 || step != step_) {
        keys_[num_steps_ % kSteps] = 0;
        ++num_steps_;
        step_ = step;
      }
      last = peak;
      highest = std::max(highest, peak.max_key);
      uint64_t& key = keys_[(num_steps_ - 1) % kSteps];
      key = std::max(key, peak.max_key);
    }
    // The largest keys of the last steps in which there were any, the oldest first.
    std::vector<uint64_t> recent() const {
      std::vector<uint64_t> keys;
      const size_t count = std::min(num_steps_, kSteps);
      for (size_t i = num_steps_ - count; i < num_steps_; ++i) keys.push_back(keys_[i % kSteps]);
      return keys;
    }

   private:
    static constexpr size_t kSteps = 16;  // of which a trend is told; chosen
    std::array<uint64_t, kSteps> keys_;
    size_t num_steps_ = 0;
    int64_t step_ = 0;
  };

  // Adds the peaks of a frame's finite entries, and notes which of the others overflowed. Skips
  // inputs.
  void add(const Frame& frame) {
    for (const Entry& entry : frame.entries) {
      const bool is_real =
          entry.kind == EntryKind::kTensor && !dtype_info(entry.dtype).is_integer();
      if (!is_real || entry.listing.role == Role::kInput || entry.stat.is_empty()) continue;
      const Place place{frame.kind, frame.module, entry.listing.label};
      if (entry.stat.is_finite()) {
        add({place, entry.dtype, entry.stat.max_key});
      } else if (entry.is_bad() && !frame.is_of_gradients()) {  // a GradScaler may scale those
        is_spent_ = true;
        const auto found = histories_.find(place);
        if (found != histories_.end()) found->second.has_overflowed = true;
      }
    }
  }

  void begin_step() {
    ++step_;
    least_.reset();
    is_spent_ = false;
    largest_gradient_ = 0;
    num_zero_gradients_ = 0;
    low_.clear();
  }
  // The largest finite magnitude of the gradients of parameters in this step; 0 if there were none.
  double largest_gradient() const { return largest_gradient_; }
  // How many gradients of parameters were 0 throughout in this step.
  int64_t num_zero_gradients() const { return num_zero_gradients_; }
  // True if something other than a gradient was not finite in this step.
  bool is_spent() const { return is_spent_; }
  // The finite peak of the step that has the fewest bits left.
  const std::optional<Peak>& least() const { return least_; }
  // From now on low() lists the places whose peaks have fewer bits left.
  void set_low(double bits) { low_bits_ = bits; }
  const std::vector<Place>& low() const { return low_; }
  // Whether a place's values at the end of a narrow dtype are to be counted: after the 1st, 2nd,
  // 4th, 8th, ... step in which there were some, the next time.
  bool wants_count(const Place& place) { return !to_count_.empty() && to_count_.erase(place) > 0; }

  // The history of an entry, or null.
  const History* find(const Place& place) const {
    const auto found = histories_.find(place);
    return found == histories_.end() ? nullptr : &found->second;
  }
  const std::unordered_map<Place, History, PlaceHash>& histories() const { return histories_; }

 private:
  // Labels that never repeat must not fill the memory of a long run.
  static constexpr size_t kMaxHistories = 1 << 16;
  static constexpr size_t kMaxLow = 1 << 12;  // limits the list of a step; chosen

  void add(const Peak& peak) {
    if (peak.place.kind == FrameKind::kGradients) {
      const double magnitude = decode_key(dtype_info(peak.dtype), peak.max_key);
      largest_gradient_ = std::max(largest_gradient_, magnitude);
      num_zero_gradients_ += magnitude == 0;
    }
    // A value that equals the limit was set on purpose, such as finfo.min in a mask.
    if (peak.max_key != peak.limit()) {
      const double bits = peak.bits();
      if (!least_ || bits < least_->bits()) least_ = peak;
      if (bits < low_bits_ && low_.size() < kMaxLow) low_.push_back(peak.place);
    }
    const auto found = histories_.find(peak.place);
    if (found != histories_.end()) {
      found->second.add(peak, step_);
      note_limit(found->second);
    } else if (histories_.size() < kMaxHistories) {
      History& history = histories_[peak.place];
      history.add(peak, step_);
      note_limit(history);
    }
  }

  // Casts to the narrow dtypes end there on devices that saturate; a mask's number in a wide one
  // is no news.
  void note_limit(History& history) {
    const DtypeInfo& info = dtype_info(history.last.dtype);
    const bool is_narrow = info.key_bytes == 1 || history.last.dtype == Dtype::kFloat16;
    if (!is_narrow || history.last.max_key != history.last.limit()) return;
    const int64_t steps = ++history.steps_at_limit;
    if ((steps & (steps - 1)) == 0) to_count_.insert(history.last.place);
  }

  int64_t step_ = 0;
  bool is_spent_ = false;
  double low_bits_ = -1;
  double largest_gradient_ = 0;
  int64_t num_zero_gradients_ = 0;
  std::optional<Peak> least_;
  std::vector<Place> low_;
  std::unordered_set<Place, PlaceHash> to_count_;
  std::unordered_map<Place, History, PlaceHash> histories_;
};

}  // namespace overflow_fast
