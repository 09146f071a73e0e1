// A device whose kernels are CUDA's, run by the emulation on the CPU's memory, with streams,
// events and graphs that a test controls.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <vector>

#include "../../csrc/scan/cuda/scan_kernel.h"
#include "../../csrc/scan/cuda/step_end_kernel.h"
#include "../../csrc/scan/device.h"
#include "../../csrc/scan/variants.h"

namespace {

using namespace overflow_fast;

struct State {
  int64_t stream;
  int64_t is_capturing;
  int64_t holds_events;  // events do not pass by themselves
  int64_t fails_scans;
  int64_t fails_events;
  int64_t fails_streams;
  int64_t fails_ends;
  int64_t num_scans;
  int64_t scanned_on;  // the last one's stream
  int64_t num_ends;
  int64_t num_waits;  // the host's, for events that had not passed
  int64_t num_stream_waits;
  int64_t num_synchronizations;
  int64_t num_events;        // made
  int64_t ended_stream;      // no event can be recorded there
  int64_t wrong_scans;       // of no finite value
  int64_t has_died;          // each call fails from then on
  int64_t has_own_streams;   // those of odd numbers last, as CUDA's of torch
  int64_t capturing_thread;  // the only one that does; 0: all
  int64_t num_records;       // of events
  int64_t own_offset;        // from tensors' addresses to those at which the kernels see them
};
State state;
// As behind an assert on a GPU, which ends its context.
void require_life() {
  if (state.has_died) throw std::runtime_error("device-side assert triggered\nwith details");
}
std::vector<std::function<void()>> graph;

template <class T>
T* own(T* at) {
  return at == nullptr ? at
                       : reinterpret_cast<T*>(reinterpret_cast<intptr_t>(at) + state.own_offset);
}

class EmulatedEvent final : public DeviceEvent {
 public:
  EmulatedEvent() { ++state.num_events; }
  void record(int64_t stream) override {
    require_life();
    if (stream != 0 && stream == state.ended_stream) throw std::runtime_error("no such stream");
    if (state.fails_events) throw std::runtime_error("device lost\nwith details");
    ++state.num_records;
    has_passed_ = false;
  }
  bool has_passed() override {
    if (has_passed_ || state.has_died) return has_passed_;
    return has_passed_ |= !state.holds_events && (!is_polled() || has_number());
  }
  void wait() override {
    require_life();
    if (state.fails_events) throw std::runtime_error("device lost\nwith details");
    if (state.is_capturing) throw std::runtime_error("a wait during a capture");
    state.num_waits += !has_passed();
    if (is_polled() && !has_number()) throw std::runtime_error("the slots did not arrive");
    has_passed_ = true;
  }
  void block(int64_t) override {
    require_life();
    ++state.num_stream_waits;
  }

 private:
  bool has_passed_ = false;
};

// A view with sizes and strides of its own, as a captured launch has them.
struct OwnView {
  explicit OwnView(const View& view)
      : sizes(view.sizes, view.sizes + view.ndim),
        strides(view.strides, view.strides + view.ndim),
        view(view) {}
  View get() const { return {view.data, view.dtype, sizes.data(), strides.data(), view.ndim}; }
  std::vector<int64_t> sizes, strides;
  View view;
};

void launch(const View* views, int64_t count, Slot* slots, const SeenStep& seen = {}) {
  const Variants variants = read_variants();
  cuda::Target target{nullptr,
                      2,
                      variants.cuda_blocks,
                      variants.has_large_lists,
                      variants.has_small_lists,
                      variants.cuda_turn,
                      variants.splits_lists};
  if (cuda::ask_fits(target) != cudaSuccess) std::abort();
  std::vector<View> there(views, views + count);
  for (View& view : there) view.data = own(view.data);
  if (cuda::launch_scan(there.data(), count, own(slots), target, seen) != cudaSuccess) std::abort();
}

class EmulatedDevice final : public Device {
 public:
  void scan(const View* views, int64_t count, Slot* slots, int64_t stream,
            const SeenStep& seen) override {
    require_life();
    if (state.fails_scans) throw std::runtime_error("launch failed\nwith details");
    ++state.num_scans;
    state.scanned_on = stream;
    if (!state.is_capturing) {
      launch(views, count, slots, seen);
      for (int64_t i = 0; state.wrong_scans && i < count; ++i) own(slots)[i].infs = 0;
      return;
    }
    graph.push_back([own = std::vector<OwnView>(views, views + count), count, slots] {
      std::vector<View> captured;
      for (const OwnView& view : own) captured.push_back(view.get());
      launch(captured.data(), count, slots);
    });
  }
  void end_step(const SlotsEnd& end) override {
    require_life();
    if (state.fails_ends) throw std::runtime_error("launch failed\nwith details");
    ++state.num_ends;
    SlotsEnd there = end;
    there.slots = own(end.slots);
    there.flag_bits = own(end.flag_bits);
    there.flags = own(end.flags);
    if (cuda::launch_step_end(there, nullptr) != cudaSuccess) std::abort();
  }
  int64_t current_stream() override {
    if (state.fails_streams) throw std::runtime_error("device lost");
    return state.stream;
  }
  int64_t default_stream() override { return 0; }
  bool is_lasting(int64_t stream) override {
    return stream == 0 || (stream % 2 != 0 && state.has_own_streams);
  }
  bool is_capturing() override {
    require_life();
    const bool is_here =
        state.capturing_thread == 0 || state.capturing_thread == static_cast<int64_t>(gettid());
    return state.is_capturing && is_here;
  }
  std::unique_ptr<DeviceEvent> make_event() override { return std::make_unique<EmulatedEvent>(); }
  void synchronize() override {
    require_life();
    if (state.fails_streams) throw std::runtime_error("device lost");
    ++state.num_synchronizations;
  }
};

}  // namespace

extern "C" Device* emulated_open(int64_t) {
  static EmulatedDevice device;
  return &device;
}
// One that was never used.
extern "C" Device* emulated_open_fresh(int64_t) { return new EmulatedDevice; }
extern "C" State* emulated_state() { return &state; }
extern "C" void emulated_step_end(Slot* slots, int64_t count, const int64_t* flag_bits,
                                  int64_t stride, float* flags, bool sets_flags, Slot* host,
                                  uint64_t* epoch, uint64_t number) {
  const SlotsEnd end{slots, count, flag_bits, stride, flags, sets_flags, host, epoch, number};
  if (cuda::launch_step_end(end, nullptr) != cudaSuccess) std::abort();
}
extern "C" void emulated_replay() {
  for (const auto& node : graph) node();
}
extern "C" void emulated_drop_node() { graph.pop_back(); }
extern "C" void emulated_reset() {
  state = State{.own_offset = state.own_offset};
  graph.clear();
}
