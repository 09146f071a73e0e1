// Collects the frames of a step: the inputs and outputs of each module, as entries with slots.
//
// On the CPU a slot is filled when its entry is recorded, and a frame can be classified at once. On
// a device the slots stay there, and frames wait until those have arrived on the host (deferred.h).
// Either way the same code classifies frames in execution order and puts them into the history.
//
// A stat reaches its reader in one of three ways. A frame whose stats are known is classified, by
// finish() or process_arrived(), and passed to the owner's on_frame() or returned with its step by
// take_step_results(). Kernels that do not wait for the host read a flag (Deferred::want_flags).
// Tensors that are in no frame are scanned by scan_tensors().
//
// Everything here runs under the GIL, except for the scan of a large tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <deque>
#include <list>
#include <optional>
#include <unordered_map>
#include <utility>
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
#include "step_rows.h"
#include "traced.h"
#include "underflow.h"
#include "unwatched.h"

namespace overflow_fast {

// Adds its lifetime to a sum.
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
  bool strict_compat = false;  // list what transformers lists, nothing else
  bool list_kwargs = false;    // list keyword inputs like positional ones
  bool use_memo = true;
  bool defer = false;         // treat the CPU as a device
  bool fetch_frames = false;  // classify each frame as it ends, with a sync if needed
  // Step mode: collect the bad frames, and those before the first, instead of calling on_frame().
  // Headroom and the time spent here are measured, and all inputs may be additive masks.
  bool step_mode = false;
  bool lists_parameters = true;    // in the frames of their modules
  bool lists_calls = true;         // their inputs and outputs
  bool parameters_once = false;    // see wants_parameter()
  bool watches_gradients = false;  // of outputs
  bool captures_tensors = false;   // inputs and outputs of the first bad frame's call
};

// The bad frames since the last take_step_results().
struct StepResults {
  std::vector<Frame> before;  // the history when the first bad frame came
  std::vector<Frame> bad;     // the first of them, in execution order
  int64_t num_bad = 0;
  // Of bad[0]: (args, kwargs, output) or a gradient. Null if not captured.
  py::object captured_tensors;
};

class Recorder {
 public:
  Recorder(std::optional<int64_t> max_frames, Options options);
  ~Recorder();

  const Options& options() const { return options_; }
  LabelTable& labels() { return labels_; }
  const LabelTable& labels() const { return labels_; }

  // A frame is built by add_*() calls and completed by finish(). finish() returns true if the frame
  // was classified and needs attention; the caller then passes it to keep().
  Frame begin_frame(uint32_t module, py::object class_name, FrameKind kind);
  void add_tensor(Frame& frame, Listing listing, const at::Tensor& tensor);
  // True if a module's parameter should be listed in the frame of its call. With parameters_once it
  // is where it is used first in a step; in an evaluation, where it is used first, and again once it
  // was written to. Writes past the version counter (.data, numpy) are not seen.
  bool wants_parameter(const at::Tensor& parameter);
  void forget_parameters() {
    listed_.clear();
    evaluated_.clear();
  }
  // Those that evaluations have listed, but for this one.
  void forget_parameters_but_of(int64_t batch) {
    std::erase_if(evaluated_, [batch](const auto& each) { return each.second.batch != batch; });
  }
  // Records the gradient of an output when backward computes it, if the options ask for that.
  void watch_output(const Frame& frame, LabelId label, const at::Tensor& output);
  void add_not_scanned(Frame& frame, Listing listing, py::object why);
  // The role of an entry with this label in a frame of this kind.
  Role role_of(FrameKind kind, LabelId label) const {
    const bool is_forward = kind == FrameKind::kForward || kind == FrameKind::kRecomputed;
    return is_forward ? labels_.role(label) : overflow_fast::role_of(kind);
  }
  // The listing of a part of a call. An input that transformers does not list is listed only if it
  // is bad, and the -inf of an additive mask raises no alarm; the attributes of objects in outputs
  // are listed only if they are bad.
  Listing listing(Part part, LabelId label) const {
    switch (part) {
      case Part::kInput: return {label, false, options_.step_mode ? Slot::kNegativeInf : 0};
      case Part::kWithinInput: return {label, !options_.list_kwargs, Slot::kNegativeInf};
      case Part::kWithinOutput: return {label, true};
      default: return {label};
    }
  }
  // Fills the frame of a compiled call: see traced.h.
  void add_traced(Frame& frame, const TracedCall& call, at::TensorList tensors);
  // Counts the tensors of calls that compiled code has no operator for.
  void count_hidden(const TracedCall& call);
  // The call with an id; parses its text at the first use.
  const TracedCall& traced_call(int64_t id, std::string_view text);
  void add_none(Frame& frame, Listing listing);
  void add_not_tensor(Frame& frame, Listing listing);
  // Counts a value that may hold tensors and was not opened.
  void note_opaque(Frame& frame, const py::object& type) {
    frame.has_opaque = true;
    coverage_.count_opaque(type);
  }
  bool finish(Frame& frame);

  // Scans tensors outside of any call as one frame, each under its name and without the memo. With
  // parameters_once, leaves out the weights that a call has listed.
  void record(FrameKind kind, const std::vector<py::str>& names,
              const std::vector<at::Tensor>& tensors);
  // Likewise what a call has returned that no hook records. Returns true if it is finite, and all
  // stats so far are here.
  bool record_output(int64_t batch, const std::vector<py::str>& names,
                     const std::vector<at::Tensor>& tensors);
  // Scans in another way what frames of no call list, and a scan has failed for. find(kind, name)
  // returns the tensor, or None, which leaves it not scanned. What cannot be scanned is bad.
  void scan_failed(const py::object& find);
  // See Deferred.
  void raise_lost() { deferred_.raise_lost(); }
  // Records the gradient of an output. Throws nothing but interrupts.
  void record_gradient(uint32_t module, LabelId label, const at::Tensor& gradient);
  // Counts a frame that could not be recorded; the watched program goes on.
  void note_failure(const py::object& why) { coverage_.count(why); }
  void note_compiled_autograd() {
    coverage_.count(py::str("compiled autograd runs no hook of ours"));
  }
  // Switches the gradient hooks in autograd's graphs on or off.
  void set_gradients_wanted(bool is_wanted) { sink_->recorder = is_wanted ? this : nullptr; }
  bool wants_gradients() const { return sink_->recorder != nullptr; }
  StepResults take_step_results();
  // True if the tensors of a call should be captured in case its frame is the first bad one.
  bool wants_tensors() const { return options_.captures_tensors && results_.num_bad == 0; }
  bool is_bad() const { return results_.num_bad > 0; }
  void capture(py::object tensors) { results_.captured_tensors = std::move(tensors); }
  // The calls that attribution may still need. forget_calls() drops those that its last call left,
  // or all.
  const std::vector<Call>& calls() const { return calls_; }
  void forget_calls(bool forgets_all);
  Headroom& headroom() { return headroom_; }
  Rules& rules() { return rules_; }
  // The counts since the last call; none while a graph is being captured.
  bool has_counts() const { return !underflow_.is_empty(); }
  std::vector<Underflow::Counts> take_underflow();
  StepRows& rows() { return rows_; }
  // True if the oldest row of a step that has ended waits for no stat.
  bool has_row() const {
    const StepRows::Row* oldest = rows_.oldest();
    return oldest != nullptr && !deferred_.waits_for(oldest->last_frame);
  }
  double seconds = 0;  // spent in hooks, in step mode

  // True if waiting frames should be fetched before the next one begins.
  bool should_fetch() const { return options_.fetch_frames && !deferred_.is_empty(); }
  // See Deferred.
  void send(bool with_captured);
  void want_flags() { deferred_.want_flags(); }
  std::vector<at::Tensor> take_flags() { return deferred_.take_flags(); }
  // Classifies the frames that Deferred::receive() returns. Calls on_batch(number) where another
  // batch's frames begin, and on_frame(frame) for a frame that needs attention.
  void process_arrived(size_t max_in_flight, const py::object& on_batch,
                       const py::object& on_frame);
  void keep(Frame&& frame);

  // Ends the step: drops its memo and the host's slots.
  void end_step();
  void begin_batch(int64_t number) {
    Course& own = course();
    own.batch = number;
    own.opens_batch = true;
  }

  // The running batch, also before its first frame, or between two the one before.
  int64_t last_batch() const {
    const Course& own = course();
    return own.opens_batch && !own.in_step && own.batch > 0 ? own.batch - 1 : own.batch;
  }
  // True while the root's forward is running, in this thread or one that it has started.
  bool in_step() const { return course().in_step; }
  void set_in_step(bool is_running) { course().in_step = is_running; }
  // True while a forward runs that belongs to no training step.
  bool is_evaluation() const { return course().is_evaluation; }
  void set_is_evaluation(bool is_one) { course().is_evaluation = is_one; }
  // Gives this thread a step of its own, as long as the root runs in it and in another one, too.
  void begin_apart() { apart_.push_back({PyThread_get_thread_ident()}); }
  void end_apart();
  // Records nothing of what threads run until they call end_apart(): their forwards began before
  // the hooks recorded anything. Python's numbers of threads.
  void leave_out(const std::vector<unsigned long>& threads);
  bool is_left_out() const { return course().is_left_out; }

  std::deque<Frame>& history() { return history_; }
  const std::deque<Frame>& history() const { return history_; }
  std::optional<int64_t> max_frames;
  bool is_paused = false;  // hooks that could not be removed record nothing
  // True if hooks record nothing of what this thread runs.
  bool is_off() const { return is_paused || Unwatched::depth() > depth_ || course().is_left_out; }
  void note_depth() { depth_ = Unwatched::depth(); }
  bool watches_every_frame = false;
  bool lists_parameters;          // at first as in the options
  bool counts_underflow = false;  // in all entries but inputs
  int64_t total_calls = 0;
  int64_t num_syncs() const { return deferred_.num_syncs(); }
  int64_t num_sends() const { return deferred_.num_sends(); }
  // The number of frames that all recorders have begun.
  static int64_t num_frames() { return num_frames_; }
  const Coverage& coverage() const { return coverage_; }

 private:
  void fill(Frame frame, const std::vector<py::str>& names, const std::vector<at::Tensor>& tensors);
  // True if the frame is bad or every frame is watched; otherwise it goes into the history. In step
  // mode it goes into the results.
  bool classify(Frame& frame);
  void apply_rules(Frame& frame);
  void add_result(Frame&& frame);
  void note_call(const Frame& frame);
  // Scanning a smaller tensor on the host again costs less than remembering it: that keeps memory
  // of the tensor until the step ends.
  static constexpr int64_t kMinMemoBytes = 4096;
  // Limit the memory of a step with many calls: those after the first bad ones are alike, and of
  // calls that nobody asks for the older half goes.
  static constexpr size_t kMaxBadFrames = 4096;
  static constexpr size_t kMaxCalls = 1 << 16;

  // True if a tensor's stat is known as soon as it is scanned.
  bool is_here(const at::Tensor& tensor) const { return tensor.is_cpu() && !options_.defer; }
  // True if a copy to the host may be under way that the program waits for later. Weights and what
  // belongs to them are judged when it has waited for them.
  bool may_arrive(const Frame& frame, Role role, const at::Tensor& tensor) const {
    if (!frame.waits && !deferred_.has_devices()) return false;
    const bool is_settled = role == Role::kWeight || role == Role::kBuffer ||
                            role == Role::kGradient || role == Role::kOptimizerState;
    return !is_settled && is_pinned(tensor);
  }
  SlotRef scan_to_slot(const at::Tensor& tensor, const View& view);
  void add_pinned(Frame& frame, Listing listing, const at::Tensor& tensor, const View& view);
  void add_unscanned(Frame& frame, Listing listing, const at::Tensor& tensor, const View& view);
  void add_scanned(Frame& frame, Listing listing, const at::Tensor& tensor, const View& view);
  void add_stat(Frame& frame, Listing listing, const at::Tensor& tensor, Memo::Known known);
  void scan_remembered(Frame& frame);
  void scan_failed(Entry& entry, const at::Tensor& tensor);
  void add_wrapper(Frame& frame, Listing listing, const at::Tensor& tensor);
  void add_known(Frame& frame, Listing listing, const Entry* known);
  // Compiled code writes to its tensors without changing their version counters.
  bool uses_memo(const Frame& frame) const { return options_.use_memo && frame.traced == nullptr; }

  inline static int64_t num_frames_ = 0;

  Options options_;
  LabelTable labels_;
  Memo memo_;
  size_t frame_mark_ = 0;
  std::vector<Slot> host_slots_;
  Coverage coverage_;
  Deferred deferred_{coverage_};
  std::vector<Entry> spare_;  // memory of the last dropped frame, for reuse
  std::vector<Unscanned> spare_unscanned_;
  std::deque<Frame> history_;
  Traced traced_;
  std::vector<py::object> class_names_;  // of the modules, by their index
  // A parameter that was listed: its memory, whose address is not reused meanwhile, its version, and
  // the batch. Torch would not swap parameters that were weakly referenced themselves.
  struct Listed {
    WeakStorage memory;
    std::optional<uint32_t> version;
    int64_t batch;
  };
  std::unordered_map<TensorId, Listed> listed_;     // in this step
  std::unordered_map<TensorId, Listed> evaluated_;  // in evaluations
  std::shared_ptr<GradientSink> sink_ = std::make_shared<GradientSink>(this);
  StepResults results_;
  std::vector<Frame> failed_;  // of no call, in this step
  std::vector<Call> calls_;
  size_t num_calls_judged_ = 0;  // the first of `calls_`: left by the last forget_calls()
  Headroom headroom_;
  Rules rules_;
  Underflow underflow_;
  StepRows rows_;
  // The step that a thread is in. All threads share one, but those that run the root meanwhile.
  struct Course {
    unsigned long thread = 0;
    int64_t batch = 0;
    bool opens_batch = true;
    bool in_step = false;
    bool is_evaluation = false;
    bool is_left_out = false;
  };
  const Course& course() const;
  Course& course() { return const_cast<Course&>(std::as_const(*this).course()); }
  Course shared_;
  int depth_ = 0;            // of Unwatched, where the hooks were put on
  std::list<Course> apart_;  // one that is held stays where it is
};

}  // namespace overflow_fast
