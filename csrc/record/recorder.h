// Collects the frames of a step: what each module was given and returned, as entries with slots.
//
// On the CPU a slot is filled when its entry is recorded, and a frame can be judged at once. On
// a device the slots stay there, and frames wait until those have come (deferred.h). Either way
// a frame is judged in execution order by the same code, and ends in the history.
//
// There are three ways to who reads a stat. A frame whose stats are known is classified, as it ends
// or by process_arrived(): the owner's on_frame() looks at it, or take_step_results() hands it out
// with its step. Kernels that do not wait for the host read a flag (Deferred::want_flags). What is
// in no frame is scanned for who asks (scan_tensors).
//
// Everything here runs under the GIL, except for the scan of a large tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../scan/layout.h"
#include "../scan/stat.h"
#include "deferred.h"
#include "frame.h"
#include "gradients.h"
#include "headroom.h"
#include "labels.h"
#include "memo.h"
#include "rules.h"
#include "traced.h"
#include "underflow.h"

namespace overflow_fast {

// Adds the time that it lives to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), begin_(Clock::now()) {}
  Stopwatch(const Stopwatch&) = delete;
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  Clock::time_point begin_;
};

struct Options {
  bool strict_compat = false;  // look where transformers looks, nowhere else
  bool list_kwargs = false;    // list keyword inputs like positional ones
  bool use_memo = true;
  bool defer = false;         // treat the CPU as a device
  bool fetch_frames = false;  // judge each frame as it ends, by a sync if it needs one
  // For who judges a whole step at once: bad frames are kept, with those before the first,
  // and nobody is called; headroom and the time spent here are measured; additive masks may be
  // among all inputs.
  bool step_mode = false;
  bool lists_parameters = true;    // in the frames of their modules
  bool lists_calls = true;         // their inputs and outputs
  bool parameters_once = false;    // each only until forget_parameters(), where it is used first
  bool watches_gradients = false;  // of outputs
  bool captures_tensors = false;   // what the first bad frame's call was given and returned
};

// The bad frames since they were last taken.
struct StepResults {
  std::vector<Frame> before;  // the history when the first bad frame came
  std::vector<Frame> bad;     // the first of them, in execution order
  int64_t num_bad = 0;
  // Of bad[0]: (args, kwargs, output) or a gradient. Null if it is not known.
  py::object captured_tensors;
};

class Recorder {
 public:
  Recorder(std::optional<int64_t> max_frames, Options options);
  ~Recorder();

  const Options& options() const { return options_; }
  LabelTable& labels() { return labels_; }
  const LabelTable& labels() const { return labels_; }

  // A frame is built by add_*() calls on it and given back by finish(). finish() returns true if
  // the frame was judged and somebody should look at it; it is the caller's to keep() then.
  Frame begin_frame(uint32_t module, py::object class_name, FrameKind kind);
  void add_tensor(Frame& frame, Listing listing, const at::Tensor& tensor);
  // Whether a module's parameter is to be listed in the frame of its call.
  bool wants_parameter(const at::Tensor& parameter) {
    if (!options_.parameters_once) return true;
    return seen_.try_emplace(id_of(parameter), weak_tensor(parameter)).second;
  }
  void forget_parameters() { seen_.clear(); }
  // Has the gradient of an output looked at when backward computes it, if that is wanted.
  void watch_output(const Frame& frame, LabelId label, const at::Tensor& output);
  void add_not_scanned(Frame& frame, Listing listing, py::object why);
  // What an entry with this label is in a frame of this kind.
  Role role_of(FrameKind kind, LabelId label) const {
    const bool is_forward = kind == FrameKind::kForward || kind == FrameKind::kRecomputed;
    return is_forward ? labels_.role(label) : overflow_fast::role_of(kind);
  }
  // How a part of a call is listed. Where transformers never looks, a value is listed only if it
  // is bad, and the -inf of an additive mask is no alarm.
  Listing listing(Part part, LabelId label) const {
    switch (part) {
      case Part::kInput: return {label, false, options_.step_mode ? Slot::kNegativeInf : 0};
      case Part::kWithinInput: return {label, !options_.list_kwargs, Slot::kNegativeInf};
      default: return {label};
    }
  }
  // Fills the frame of a compiled call: see traced.h.
  void add_traced(Frame& frame, const TracedCall& call, at::TensorList tensors);
  // Counts the tensors of calls that compiled code has no operator for.
  void count_hidden(const TracedCall& call);
  // The call with an id; reads its text at the first use.
  const TracedCall& traced_call(int64_t id, std::string_view text);
  void add_none(Frame& frame, Listing listing);
  void add_not_tensor(Frame& frame, Listing listing);
  bool finish(Frame& frame);

  // Scans tensors that stand in no call as one frame, each under its name; not from memory. Of
  // weights only those that were not listed in a call.
  void record(FrameKind kind, const std::vector<py::str>& names,
              const std::vector<at::Tensor>& tensors);
  // Records the gradient of an output. Never throws what is not an interrupt.
  void record_gradient(uint32_t module, LabelId label, const at::Tensor& gradient);
  // What was to be recorded is not, and the watched program goes on.
  void note_failure(const py::object& why) { coverage_.count(why); }
  void note_compiled_autograd() {
    coverage_.count(py::str("compiled autograd runs no hook of ours"));
  }
  // Switches the hooks on gradients that are in autograd's graphs on and off.
  void set_gradients_wanted(bool is_wanted) { sink_->recorder = is_wanted ? this : nullptr; }
  bool wants_gradients() const { return sink_->recorder != nullptr; }
  StepResults take_step_results();
  // Keeps what a call was given and returned if its frame is the first bad one.
  bool wants_tensors() const { return options_.captures_tensors && results_.num_bad == 0; }
  bool is_bad() const { return results_.num_bad > 0; }
  void hold(py::object tensors) { results_.captured_tensors = std::move(tensors); }
  // The calls that may still be asked for. forget_calls() forgets those that it left the last time,
  // or all.
  const std::vector<Call>& calls() const { return calls_; }
  void forget_calls(bool forgets_all);
  Headroom& headroom() { return headroom_; }
  Rules& rules() { return rules_; }
  // What was counted since the last call, but not while a graph is being captured.
  std::vector<Underflow::Counts> take_underflow() {
    return deferred_.is_capturing() ? std::vector<Underflow::Counts>() : underflow_.take();
  }
  double seconds = 0;  // spent in hooks, where frames are gathered

  // Whether frames wait that should be fetched before the next one begins.
  bool should_fetch() const { return options_.fetch_frames && !deferred_.is_empty(); }
  // See Deferred.
  void send(bool with_captured);
  void want_flags() { deferred_.want_flags(); }
  std::vector<at::Tensor> take_flags() { return deferred_.take_flags(); }
  // Judges the frames that Deferred::receive hands out. on_batch(number) is called where another
  // batch's frames begin, on_frame(frame) for a frame that somebody should look at.
  void process_arrived(size_t max_in_flight, const py::object& on_batch,
                       const py::object& on_frame);
  void keep(Frame&& frame);

  // The memo and the host's slots of a step end with it.
  void end_step();
  void begin_batch(int64_t number) {
    batch_ = number;
    opens_batch_ = true;
  }

  // The batch that has frames: the one that runs or, between two, the one before.
  int64_t last_batch() const { return opens_batch_ && batch_ > 0 ? batch_ - 1 : batch_; }

  std::deque<Frame>& history() { return history_; }
  const std::deque<Frame>& history() const { return history_; }
  std::optional<int64_t> max_frames;
  bool in_step = false;    // the root's forward is running
  bool is_paused = false;  // hooks that could not be taken off record nothing
  bool watches_every_frame = false;
  bool lists_parameters;          // Options', until it is changed
  bool counts_underflow = false;  // of what modules make, and of what is recorded
  int64_t total_calls = 0;
  int64_t num_syncs() const { return deferred_.num_syncs(); }
  int64_t num_sends() const { return deferred_.num_sends(); }
  // How many frames all recorders have begun.
  static int64_t num_frames() { return num_frames_; }
  const Coverage& coverage() const { return coverage_; }

 private:
  // True if the frame is bad or every frame is asked for; otherwise it goes into the history.
  bool classify(Frame& frame);
  void add_result(Frame&& frame);
  void note_call(const Frame& frame);
  // A smaller tensor on the host is scanned again sooner than it is remembered: what remembering
  // costs is the tensor's own memory, which is given back only when the step ends.
  static constexpr int64_t kMinMemoBytes = 4096;
  static constexpr size_t kMaxBadFrames = 4096;
  static constexpr size_t kMaxCalls = 1 << 16;

  // Whether a tensor's stat is known as soon as it is scanned.
  bool is_here(const at::Tensor& tensor) const { return tensor.is_cpu() && !options_.defer; }
  SlotRef scan_to_slot(const at::Tensor& tensor, const View& view);
  void add_unscanned(Frame& frame, Listing listing, const at::Tensor& tensor, const View& view);
  void add_scanned(Frame& frame, Listing listing, const at::Tensor& tensor, const View& view);
  void add_stat(Frame& frame, Listing listing, const at::Tensor& tensor, Memo::Known known);
  void add_wrapper(Frame& frame, Listing listing, const at::Tensor& tensor);
  void add_known(Frame& frame, Listing listing, const Entry* known);
  // Compiled code writes to its tensors without their version counters.
  bool uses_memo(const Frame& frame) const { return options_.use_memo && frame.traced == nullptr; }

  inline static int64_t num_frames_ = 0;

  Options options_;
  LabelTable labels_;
  Memo memo_;
  size_t frame_mark_ = 0;
  std::vector<Slot> host_slots_;
  Coverage coverage_;
  Deferred deferred_{coverage_};
  std::vector<Entry> spare_;  // the last dropped frame's memory
  std::vector<Unscanned> spare_unscanned_;
  std::deque<Frame> history_;
  Traced traced_;
  std::vector<py::object> class_names_;  // of the modules, by their index
  // Parameters; what is held weakly keeps its address to itself.
  std::unordered_map<TensorId, WeakTensor> seen_;
  std::shared_ptr<GradientSink> sink_ = std::make_shared<GradientSink>(this);
  StepResults results_;
  std::vector<Call> calls_;
  size_t num_calls_judged_ = 0;  // of `calls_`, the first
  Headroom headroom_;
  Rules rules_;
  Underflow underflow_;
  int64_t batch_ = 0;
  bool opens_batch_ = true;
};

}  // namespace overflow_fast
