// The kinds of non-finite values that scans met, in memory that the host can read when it can no
// longer ask the device: one that has failed, as behind a device-side assert, gives back no slots.
#pragma once

#include <cstdint>

namespace overflow_fast {

// Of one slot. The scan that first meets a kind in it writes the number of the step there, so
// nothing has to be reset, and clean tensors write nothing.
struct SeenKinds {
  uint32_t nan;
  uint32_t positive_inf;
  uint32_t negative_inf;
  uint32_t unused;
};
static_assert(sizeof(SeenKinds) == 16);

// Of consecutive slots, in pinned memory; `slots` is null where nobody reads them.
struct SeenStep {
  SeenKinds* slots = nullptr;
  uint32_t number = 0;
};

}  // namespace overflow_fast
