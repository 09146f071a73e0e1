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
  };
  Kind kind = Kind::kNone;
  uint16_t device = 0;  // its number among Deferred's
  uint32_t index = 0;

  bool is_on_host() const { return kind == Kind::kHost; }
  bool is_on_device() const { return kind == Kind::kDevice || kind == Kind::kCaptured; }
  bool is_captured() const { return kind == Kind::kCaptured; }
};
static_assert(sizeof(SlotRef) == 8, "every entry and every remembered tensor has one");

}  // namespace overflow_fast
