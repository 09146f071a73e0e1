// Frames and their entries: the inputs and outputs of a module's call, with their stats.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "../scan/stat.h"
#include "device_slots.h"
#include "labels.h"
#include "slot_ref.h"

namespace overflow_fast {

// The kinds of frames. From kRecorded on a frame belongs to no module's call: its entries are
// tensors under names of their own.
enum class FrameKind : uint8_t {
  kForward,
  kRecomputed,  // a forward that backward runs again
  kBackward,    // the gradient of an output
  kRecorded,    // tensors that the user recorded, such as the loss
  kWeights,
  kBuffers,
  kGradients,  // of parameters
  kOptimizerState,
};

enum class EntryKind : uint8_t { kTensor, kNone, kNotTensor, kNotScanned };

// The place of an entry, the same in every step.
struct Place {
  FrameKind kind;
  uint32_t module;
  LabelId label;
  bool operator==(const Place&) const = default;
};
struct PlaceHash {
  size_t operator()(const Place& place) const {
    const uint64_t bits = (static_cast<uint64_t>(place.kind) << 56) ^
                          (static_cast<uint64_t>(place.module) << 28) ^ place.label;
    return bits * 0x9e3779b97f4a7c15;
  }
};

// The role of all entries of a frame that is not a forward.
inline Role role_of(FrameKind kind) {
  switch (kind) {
    case FrameKind::kBackward: return Role::kGradOutput;
    case FrameKind::kWeights: return Role::kWeight;
    case FrameKind::kBuffers: return Role::kBuffer;
    case FrameKind::kGradients: return Role::kGradient;
    case FrameKind::kOptimizerState: return Role::kOptimizerState;
    default: return Role::kRecorded;
  }
}

// The part of a call that a value is.
enum class Part : uint8_t {
  kNamed,        // a parameter, or something else that has a name
  kInput,        // an argument of the call
  kWithinInput,  // a value inside of an argument, or a keyword argument
  kOutput,
  kWithinOutput,  // an attribute of an object in the output that does not declare it
};

// The listing of an entry: its label, and which values of it count as bad.
struct Listing {
  LabelId label;
  bool only_if_bad = false;   // reports list it only if it is bad
  uint64_t allowed = 0;       // kinds of non-finite values that raise no alarm, as bits of Slot
  Role role = Role::kOutput;  // set by the recorder
  // Of an input: its number of in-place writes when the call ended.
  uint32_t version = 0;
  bool is_computed = false;  // of an input: an autograd node computed it
  uint64_t node = 0;         // of an input: one more than that node's number; 0: not known
};

struct Entry {
  Slot stat;  // known when the frame is classified
  SlotRef slot;
  py::object why;  // kNotScanned: the reason
  int64_t numel;
  Listing listing;
  EntryKind kind;
  Dtype dtype;
  // The order of the earlier frame that scanned the tensor, if its stat is of then; else 0.
  int64_t seen_in = 0;
  bool is_rewritten = false;  // it was finite in that frame, and torch has counted no write since
  bool has_failed = false;    // kNotScanned: its scan did, which may succeed in another way
  bool is_unseen = false;     // no way to scan it was left, though its values matter

  bool is_bad() const {
    return is_unseen ||
           (kind == EntryKind::kTensor && (stat.nonfinite_kinds() & ~listing.allowed) != 0);
  }
};

struct TracedCall;

struct Frame {
  uint32_t module;
  py::object class_name;  // of the module when the hook ran
  int64_t batch;
  bool opens_batch;
  FrameKind kind;
  int64_t order;              // counts the frames of all recorders
  bool is_bad = false;        // of the entries whose stat is known so far
  bool waits = false;         // some stat is still on its device
  bool has_failed = false;    // the scan of some tensor did
  bool has_opaque = false;    // some value may hold tensors and was not opened
  int64_t capture = 0;        // the step in which a graph capture ran the module; 0: it ran eagerly
  int64_t sends = 0;          // the number of sends before it began
  uint64_t newest_input = 0;  // see Call::begins_after
  const TracedCall* traced = nullptr;  // of a compiled call: as it was traced
  std::vector<Entry> entries;
  std::vector<Unscanned> unscanned;  // on devices; empty once the frame is finished

  bool is_recomputed() const { return kind == FrameKind::kRecomputed; }
  bool is_of_call() const { return kind < FrameKind::kRecorded; }
  bool is_of_gradients() const {
    return kind == FrameKind::kBackward || kind == FrameKind::kGradients;
  }
};

// A module's call, or the gradient of its output, whether or not its frame is bad. Autograd numbers
// the nodes that a thread makes, so a node that the call made has a number of at least
// `begins_after` and below `ends_before`.
struct Call {
  uint32_t module;
  FrameKind kind;
  int64_t order;  // its frame's
  int64_t batch;
  uint64_t thread;
  uint64_t begins_after;  // one more than the newest node among its inputs
  uint64_t ends_before;
  bool is_traced;
  bool has_unseen;  // an input or output could not be scanned
};

// Counts of what was scanned or looked into and what was not, since the recorder was created.
class Coverage {
 public:
  int64_t tensors_listed = 0;
  int64_t tensors_scanned = 0;
  int64_t bytes_scanned = 0;
  int64_t not_scanned = 0;

  void scanned(const at::Tensor& tensor) {
    ++tensors_scanned;
    bytes_scanned += static_cast<int64_t>(tensor.nbytes());
  }
  // Turns an entry into one that was not scanned.
  void give_up(Entry& entry, py::object why) {
    count(why);
    entry.kind = EntryKind::kNotScanned;
    entry.why = std::move(why);
  }
  // The same for a scan that has failed, of a tensor that could have been scanned.
  void fail(Frame& frame, Entry& entry, py::object why) {
    give_up(entry, std::move(why));
    frame.has_failed = entry.has_failed = true;
  }
  // Takes back that an entry was not scanned: it is now.
  void found(Entry& entry) {
    --not_scanned;
    entry.has_failed = false;
    entry.kind = EntryKind::kTensor;
    const py::object count = reasons_.attr("pop")(entry.why, 1) - py::int_(1);
    if (count.cast<int64_t>() > 0) reasons_[entry.why] = count;
  }
  void count(const py::object& why) {
    ++not_scanned;
    count_in(reasons_, why, py::str("other reasons"));
  }
  // Counts a value that was not looked into, by its type.
  void count_opaque(const py::object& type) { count_in(opaque_, type, py::str("other types")); }
  // The number of tensors for each reason.
  py::dict reasons() const { return reasons_.attr("copy")(); }
  size_t num_opaque_types() const { return opaque_.size(); }
  // The number of values for each type.
  py::dict opaque() const { return opaque_.attr("copy")(); }

 private:
  static constexpr size_t kMaxKeys = 32;  // a list for people; the rest is counted together

  static void count_in(py::dict& counts, const py::object& key, const py::object& rest) {
    const bool has_room = counts.size() < kMaxKeys || counts.contains(key);
    const py::object& counted = has_room ? key : rest;
    counts[counted] = counts.attr("get")(counted, 0).cast<int64_t>() + 1;
  }

  py::dict reasons_;
  py::dict opaque_;
};

}  // namespace overflow_fast
