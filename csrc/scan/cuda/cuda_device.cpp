// CUDA's implementation of Device: uses torch's current stream, device guard and error checks.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <mutex>

#include "../device_registry.h"
#include "../variants.h"
#include "scan_kernel.h"
#include "step_end_kernel.h"

namespace overflow_fast {

namespace {

cudaStream_t stream_of(c10::DeviceIndex index, int64_t id) {
  const c10::Device device(c10::DeviceType::CUDA, index);
  return c10::cuda::CUDAStream(c10::Stream(c10::Stream::UNSAFE, device, id)).stream();
}

// While another thread captures a graph in the mode that torch's captures have by default, the
// driver refuses questions about events from any thread, and ends that capture. A thread in the
// relaxed mode may ask: what it asks is no part of the graph.
struct MayAsk {
  c10::cuda::CUDAStreamCaptureModeGuard guard{cudaStreamCaptureModeRelaxed};
};

class CudaEvent final : public DeviceEvent {
 public:
  explicit CudaEvent(c10::DeviceIndex index) : index_(index) {
    const c10::cuda::CUDAGuard guard(index);
    const MayAsk may_ask;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  ~CudaEvent() override { C10_CUDA_IGNORE_ERROR(cudaEventDestroy(event_)); }

  void record(int64_t stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    C10_CUDA_CHECK(cudaEventRecord(event_, handle(stream)));
  }
  bool has_passed() override {
    if (is_polled()) return has_number();
    const MayAsk may_ask;
    // "Not ready" would take the place of an error that the program has yet to ask for.
    if (cudaPeekAtLastError() != cudaSuccess) return false;
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    C10_CUDA_CHECK(error);
    return true;
  }
  void wait() override {
    if (is_polled() && has_number()) return;
    const MayAsk may_ask;
    C10_CUDA_CHECK(cudaEventSynchronize(event_));
    TORCH_CHECK(!is_polled() || has_number(), "the slots did not arrive on the host");
  }
  void block(int64_t stream) override {
    const c10::cuda::CUDAGuard guard(index_);
    C10_CUDA_CHECK(cudaStreamWaitEvent(handle(stream), event_, 0));
  }

 private:
  cudaStream_t handle(int64_t stream) const { return stream_of(index_, stream); }

  c10::DeviceIndex index_;
  cudaEvent_t event_{};
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int64_t index) : index_(static_cast<c10::DeviceIndex>(index)) {}

  void scan(const View* views, int64_t count, Slot* slots, int64_t stream,
            const SeenStep& seen) override {
    const c10::cuda::CUDAGuard guard(index_);
    const cuda::Target where = target(stream);
    C10_CUDA_CHECK(
        cuda::launch_scan(views, count, slots, where, {as_seen_here(seen.slots), seen.number}));
  }
  void end_step(const SlotsEnd& end) override {
    const c10::cuda::CUDAGuard guard(index_);
    SlotsEnd seen = end;
    seen.host = as_seen_here(end.host);
    seen.epoch = as_seen_here(end.epoch);
    C10_CUDA_CHECK(cuda::launch_step_end(seen, c10::cuda::getCurrentCUDAStream(index_)));
  }
  int64_t current_stream() override { return c10::cuda::getCurrentCUDAStream(index_).id(); }
  int64_t default_stream() override { return c10::cuda::getDefaultCUDAStream(index_).id(); }
  // torch's own streams have odd ids, and are never destroyed (c10/cuda/CUDAStream.cpp).
  bool is_lasting(int64_t stream) override { return stream % 2 != 0 || stream == 0; }
  bool is_capturing() override {
    const c10::cuda::CUDAGuard guard(index_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(index_), &status));
    return status != cudaStreamCaptureStatusNone;
  }
  std::unique_ptr<DeviceEvent> make_event() override { return std::make_unique<CudaEvent>(index_); }
  void synchronize() override {
    const c10::cuda::CUDAGuard guard(index_);
    const MayAsk may_ask;
    C10_CUDA_CHECK(cudaDeviceSynchronize());
  }

 private:
  // The address at which the GPU writes to pinned memory: that of the host, nearly everywhere.
  template <class T>
  T* as_seen_here(T* host) {
    if (host == nullptr || properties().has_hosts_addresses) return host;
    cudaPointerAttributes attributes{};
    C10_CUDA_CHECK(cudaPointerGetAttributes(&attributes, host));
    TORCH_CHECK(attributes.type == cudaMemoryTypeHost && attributes.devicePointer != nullptr,
                "this GPU cannot write to pinned memory: unset OVERFLOW_FAST_STEP_END");
    return static_cast<T*>(attributes.devicePointer);
  }

  struct Properties {
    cuda::Target target;
    bool has_hosts_addresses;  // pinned memory is where the host sees it
  };

  cuda::Target target(int64_t stream) {
    cuda::Target target = properties().target;
    target.stream = stream_of(index_, stream);
    return target;
  }

  // Asked once, by the first thread that needs them.
  const Properties& properties() {
    std::call_once(is_known_, [this] { properties_ = {ask_target(), ask_addresses()}; });
    return properties_;
  }

  bool ask_addresses() const {
    for (const auto attribute :
         {cudaDevAttrUnifiedAddressing, cudaDevAttrCanUseHostPointerForRegisteredMem}) {
      int has_it = 0;
      C10_CUDA_CHECK(cudaDeviceGetAttribute(&has_it, attribute, index_));
      if (!has_it) return false;
    }
    return true;
  }

  cuda::Target ask_target() const {
    cuda::Target target{};
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&target.num_multiprocessors,
                                          cudaDevAttrMultiProcessorCount, index_));
    int driver = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
    const Variants variants = read_variants();
    target.takes_small_lists = variants.has_small_lists;
    target.takes_large_lists = variants.has_large_lists && driver >= 12010;
    target.blocks_per_multiprocessor = variants.cuda_blocks;
    target.turn = variants.cuda_turn;
    target.splits_lists = variants.splits_lists;
    C10_CUDA_CHECK(cuda::ask_fits(target));
    return target;
  }

  c10::DeviceIndex index_;
  std::once_flag is_known_;
  Properties properties_{};
};

const bool kIsRegistered = [] {
  register_device_type(c10::DeviceType::CUDA,
                       [](int64_t index) -> Device* { return new CudaDevice(index); });
  return true;
}();

}  // namespace

}  // namespace overflow_fast
