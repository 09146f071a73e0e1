// How near to the end of their formats values came: the least distance of a step, and the last
// finite magnitude of each entry, which says how a value stood before it was bad.
#pragma once

#include <optional>
#include <unordered_map>

#include "frame.h"

namespace overflow_fast {

class Headroom {
 public:
  struct Peak {
    Phase phase;
    uint32_t module;
    LabelId label;
    Dtype dtype;
    uint64_t max_key;

    // About how many times its magnitude could double: keys are piecewise linear logarithms.
    double bits() const {
      const DtypeInfo& info = dtype_info(dtype);
      const uint64_t limit = info.first_nonfinite() - 1;
      return std::ldexp(static_cast<double>(limit - max_key), -info.mantissa);
    }
  };

  // Takes in what a frame's modules made, where that is finite.
  void add(const Frame& frame) {
    for (const Entry& entry : frame.entries) {
      const bool is_real =
          entry.kind == EntryKind::kTensor && !dtype_info(entry.dtype).is_integer();
      if (!is_real || entry.listing.is_input || !entry.stat.is_finite() || entry.stat.is_empty()) {
        continue;
      }
      add({frame.phase, frame.module, entry.listing.label, entry.dtype, entry.stat.max_key});
    }
  }

  void begin_step() { least_.reset(); }
  // The peak of the step that has the fewest bits left.
  const std::optional<Peak>& least() const { return least_; }

  // The last finite peak of an entry, or null.
  const Peak* last(Phase phase, uint32_t module, LabelId label) const {
    const auto found = last_.find(key(phase, module, label));
    return found == last_.end() ? nullptr : &found->second;
  }

 private:
  // Labels that never repeat must not fill the memory of a long run.
  static constexpr size_t kMaxPeaks = 1 << 18;

  static uint64_t key(Phase phase, uint32_t module, LabelId label) {
    return (static_cast<uint64_t>(phase) << 56) ^ (static_cast<uint64_t>(module) << 28) ^ label;
  }

  void add(const Peak& peak) {
    if (!least_ || peak.bits() < least_->bits()) least_ = peak;
    if (last_.size() < kMaxPeaks) {
      last_[key(peak.phase, peak.module, peak.label)] = peak;
    }
  }

  std::optional<Peak> least_;
  std::unordered_map<uint64_t, Peak> last_;
};

}  // namespace overflow_fast
