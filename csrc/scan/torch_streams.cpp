#include "torch_streams.h"

#include <c10/core/Event.h>

#include "../torch_internals/backend_streams.h"

namespace overflow_fast {

namespace {

c10::Stream stream_of(c10::Device device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

class TorchEvent final : public DeviceEvent {
 public:
  explicit TorchEvent(c10::Device device) : device_(device), event_(device.type()) {}

  void record(int64_t stream) override { event_.record(stream_of(device_, stream)); }
  bool has_passed() override { return event_.query(); }
  void wait() override { event_.synchronize(); }
  void block(int64_t stream) override { event_.block(stream_of(device_, stream)); }

 private:
  c10::Device device_;
  c10::Event event_;
};

class TorchStreams final : public Streams {
 public:
  explicit TorchStreams(c10::Device device) : device_(device), streams_(device) {}

  int64_t current_stream() override { return streams_.current().id(); }
  int64_t default_stream() override { return streams_.default_one().id(); }
  bool is_capturing() override { return false; }  // torch has no question for any backend
  std::unique_ptr<DeviceEvent> make_event() override {
    return std::make_unique<TorchEvent>(device_);
  }
  void synchronize() override { streams_.synchronize(); }

 private:
  c10::Device device_;
  BackendStreams streams_;
};

}  // namespace

std::unique_ptr<Streams> torch_streams(c10::Device device) {
  if (device.is_cpu() || device.is_mps() || !has_guard(device.type())) {
    return nullptr;
  }
  auto streams = std::make_unique<TorchStreams>(device);
  try {  // a backend may lack any of them
    const auto event = streams->make_event();
    event->record(streams->current_stream());
    event->block(streams->default_stream());
    event->has_passed();
  } catch (const std::exception&) {
    return nullptr;
  }
  return streams;
}

}  // namespace overflow_fast
