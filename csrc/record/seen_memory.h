// Memory in which scans note the kinds of non-finite values for a host that can no longer ask the
// device: see ../scan/seen_kinds.h.
#pragma once

#include <utility>
#include <vector>

#include "../scan/seen_kinds.h"
#include "../scan/stat.h"

namespace overflow_fast {

// The rows of one step, beside its slots.
class SeenRows {
 public:
  SeenRows() = default;
  SeenRows(std::vector<SeenKinds*> chunks, uint32_t step)
      : chunks_(std::move(chunks)), step_(step) {}

  // A stat of the kinds that were met in the step, with neither extremes nor true counts; finite
  // where none was, or where it is not known. Does not ask the device.
  Slot stat(int64_t index) const;

 private:
  std::vector<SeenKinds*> chunks_;
  uint32_t step_ = 0;
};

// The rows of one object's slots, as their chunks grow.
class SeenMemory {
 public:
  SeenMemory();
  SeenMemory(const SeenMemory&) = delete;
  // Leaves the memory to others: scans that have yet to run write to it, under numbers of steps
  // that no other has. It is never freed.
  ~SeenMemory();

  // Makes `count` chunks of them, or throws.
  void grow(size_t count, bool is_pinned);
  // Where scans write, from a slot on.
  SeenStep from(int64_t index) const;
  // Ends the step, and returns its rows.
  SeenRows end_step();

 private:
  std::vector<SeenKinds*> chunks_;
  bool is_pinned_ = false;
  uint32_t step_;
};

}  // namespace overflow_fast
