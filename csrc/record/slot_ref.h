// A reference to the slot that holds a tensor's stat.
#pragma once

#include <cstdint>

namespace overflow_fast {

struct SlotRef {
  enum class Kind : uint8_t {
    kNone,       // no stat: not a tensor, or not scanned
    kHost,       // a slot of the recorder's own, filled already
    kUnscanned,  // no slot yet: Frame::unscanned[index] waits for its scan
    kDevice,     // a slot on a device, written in this step
    kCaptured,   // a slot on a device, written by each replay of a graph
    kPinned,     // Deferred's own: memory of the host that a device may still be writing
  };
  Kind kind = Kind::kNone;
  uint16_t device = 0;  // its number among Deferred's
  uint32_t index = 0;

  bool is_on_host() const { return kind == Kind::kHost; }
  bool is_on_device() const { return kind == Kind::kDevice || kind == Kind::kCaptured; }
  // True if the stat is known only once what was queued for the step has been waited for.
  bool is_awaited() const { return is_on_device() || kind == Kind::kPinned; }
  bool is_captured() const { return kind == Kind::kCaptured; }
};
static_assert(sizeof(SlotRef) == 8, "every entry and every remembered tensor has one");

}  // namespace overflow_fast
