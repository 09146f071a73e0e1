// Where the stat of a tensor is: in which slots, and which of them.
#pragma once

#include <cstdint>

namespace overflow_fast {

struct SlotRef {
  enum class Kind : uint8_t {
    kNone,       // nowhere: it is no tensor, or was not scanned
    kHost,       // the recorder's own, which is filled
    kUnscanned,  // nowhere yet: Frame::unscanned[index] waits for its scan
    kDevice,     // a device's, written in this step
    kCaptured,   // a device's, written by each replay of a graph
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
