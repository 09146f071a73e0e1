// "sealed": a simulated accelerator for tests on machines without one, a PrivateUse1 device.
//
// Its memory is mapped twice: at the addresses that tensors have it is PROT_NONE, and the device's
// own operations see it elsewhere. A host access from anywhere raises SIGSEGV, whose handler counts
// it, keeps its backtrace, and opens that page so that the program goes on. Operations run on the
// CPU's kernels over the same memory, without a copy, so that a copy that is counted is one that
// the program asked for. Counted: every operation by name, views apart; copies by direction; what
// makes a real device's host wait (_local_scalar_dense, nonzero, a blocking copy, synchronize ...).
// New and freed memory is filled with 0xff bytes: nan in every float, so that a read of what nobody
// wrote shows. Freed memory is reused at once by the stream that allocated it, as other streams may
// still write to it. Two devices, streams and events, a random generator for each device.
//
// Everything runs at once unless a test asks for less kindness: work that runs late (see Late),
// events that pass late, an error that surfaces at the next wait, a limit of memory.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto kSealed = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 2;
constexpr size_t kPage = 4096;
constexpr size_t kArena = size_t{8} << 30;

// ---------------------------------------------------------------- what was seen

struct Counts {
  std::mutex mutex;
  std::map<std::string, int64_t> numbers;
  void add(const std::string& name, int64_t n = 1) {
    const std::lock_guard lock(mutex);
    numbers[name] += n;
  }
};
Counts& counts() {
  static auto* instance = new Counts;
  return *instance;
}

std::atomic<int64_t> g_faults{0};
constexpr int kMaxTraces = 8;
void* g_traces[kMaxTraces][48];
int g_trace_sizes[kMaxTraces];

// ---------------------------------------------------------------- memory

thread_local c10::DeviceIndex t_device = 0;
thread_local c10::StreamId t_stream[kNumDevices] = {};

class Arena {
 public:
  Arena() {
    const int file = memfd_create("sealed", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "no memory for the arena");
    seen_ = static_cast<char*>(mmap(nullptr, kArena, PROT_NONE, MAP_SHARED, file, 0));
    own_ = static_cast<char*>(
        mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    TORCH_CHECK(seen_ != MAP_FAILED && own_ != MAP_FAILED, "no address space for the arena");
    close(file);
  }
  bool holds(const void* at) const { return at >= seen_ && at < seen_ + kArena; }
  // The address at which the device's own operations see what the program sees at `at`.
  void* own(const void* at) const {
    return at == nullptr ? nullptr : own_ + (static_cast<const char*>(at) - seen_);
  }

  int64_t own_offset() const { return own_ - seen_; }

  void* take(size_t bytes, c10::StreamId stream) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_WITH(OutOfMemoryError, used_ + bytes <= limit_,
                     "sealed device out of memory: ", bytes, " bytes");
    const size_t size = rounded(bytes);
    char* block;
    auto& spare = spare_[{stream, size}];
    if (spare.empty()) {
      TORCH_CHECK_WITH(OutOfMemoryError, end_ + size <= kArena, "sealed device out of memory");
      block = seen_ + end_;
      end_ += size;
    } else {
      block = spare.back();
      spare.pop_back();
    }
    used_ += bytes;
    peak_ = std::max(peak_, used_);
    blocks_[block] = {size, bytes, stream, {}};
    memset(own(block), 0xff, size);
    return block;
  }
  void give(void* block) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) return;
    const Block& gone = found->second;
    used_ -= gone.bytes;
    memset(own(block), 0xff, gone.size);
    // As after record_stream(): the block is reused once that stream has got here.
    auto& spare = gone.others.empty() ? spare_[{gone.stream, gone.size}] : parked_[gone.others];
    spare.push_back(static_cast<char*>(block));
    if (!gone.others.empty()) parked_sizes_[static_cast<char*>(block)] = {gone.stream, gone.size};
    blocks_.erase(found);
  }
  void used_on(void* block, c10::StreamId stream) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(block);
    if (found != blocks_.end() && stream != found->second.stream) {
      found->second.others.insert(stream);
    }
  }
  // All streams have got to where they are.
  void unpark() {
    const std::lock_guard lock(mutex_);
    for (auto& [_, blocks] : parked_) {
      for (char* block : blocks) spare_[parked_sizes_[block]].push_back(block);
    }
    parked_.clear();
    parked_sizes_.clear();
  }
  void open_page(void* at) {  // for a signal handler: no lock
    const auto page = reinterpret_cast<uintptr_t>(at) / kPage * kPage;
    mprotect(reinterpret_cast<void*>(page), kPage, PROT_READ | PROT_WRITE);
  }
  void seal() { mprotect(seen_, kArena, PROT_NONE); }
  size_t used() const { return used_; }
  size_t peak() const { return peak_; }
  void reset_peak() { peak_ = used_; }
  void limit(size_t bytes) { limit_ = bytes; }

 private:
  struct Block {
    size_t size, bytes;
    c10::StreamId stream;
    std::set<c10::StreamId> others;
  };
  static size_t rounded(size_t bytes) {
    size_t size = 64;
    while (size < bytes) size += std::max<size_t>(64, size / 4 / 64 * 64);
    return size;
  }
  char* seen_;  // the memory as the program has it: sealed
  char* own_;   // the same memory for the device's operations
  size_t end_ = 0, used_ = 0, peak_ = 0, limit_ = kArena;
  std::mutex mutex_;
  std::map<std::pair<c10::StreamId, size_t>, std::vector<char*>> spare_;
  std::map<std::set<c10::StreamId>, std::vector<char*>> parked_;
  std::map<char*, std::pair<c10::StreamId, size_t>> parked_sizes_;
  std::map<void*, Block> blocks_;
};
Arena& arena() {
  static auto* instance = new Arena;
  return *instance;
}

struct sigaction g_before;
void on_fault(int number, siginfo_t* info, void* context) {
  if (!arena().holds(info->si_addr)) {
    if (g_before.sa_flags & SA_SIGINFO) return g_before.sa_sigaction(number, info, context);
    if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) {
      return g_before.sa_handler(number);
    }
    signal(number, SIG_DFL);
    return;
  }
  const int64_t at = g_faults++;
  if (at < kMaxTraces) g_trace_sizes[at] = backtrace(g_traces[at], 48);
  arena().open_page(info->si_addr);
}

// With set_late(true) work runs as late as a real device may run it:
//   - what an operation on a stream other than 0 writes appears before the next operation of that
//     stream, or when somebody waits for it; the device sees what it reads at once;
//   - a copy from pinned memory that does not block reads that memory then, on any stream;
//   - a copy to pinned memory that does not block arrives when the host waits for it.
// Nothing that waits here keeps memory alive.
class Late {
 public:
  bool is_on() const { return is_on_; }
  void set(bool on) {
    is_on_ = on;
    if (!on) run_all();
  }
  bool wanted(c10::StreamId stream) const { return is_on_ && stream != 0; }
  // `is_arrival`: of a copy to the host, which later operations of the stream do not bring about.
  void put(c10::StreamId stream, bool is_arrival, std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queues_[stream].push_back({++number_, is_arrival, std::move(work)});
  }
  int64_t number() const { return number_; }
  // Before an operation of the stream.
  void run(c10::StreamId stream) {
    run_if(stream, [](const Work& w) { return !w.is_arrival; });
  }
  // Everything up to an event.
  void run_to(c10::StreamId stream, int64_t number) {
    run_if(stream, [&](const Work& w) { return w.number <= number; });
  }
  bool has_run_to(c10::StreamId stream, int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto& queue = queues_[stream];
    return std::none_of(queue.begin(), queue.end(),
                        [&](const Work& w) { return w.number <= number; });
  }
  void run_all() {
    std::vector<c10::StreamId> streams;
    {
      const std::lock_guard lock(mutex_);
      for (auto& [stream, queue] : queues_) streams.push_back(stream);
    }
    for (const auto stream : streams) run_to(stream, number_);
    arena().unpark();
  }

 private:
  struct Work {
    int64_t number;
    bool is_arrival;
    std::function<void()> run;
  };
  template <class F>
  void run_if(c10::StreamId stream, F is_due) {
    std::vector<Work> due;
    {
      const std::lock_guard lock(mutex_);
      std::vector<Work> rest;
      for (Work& work : queues_[stream]) (is_due(work) ? due : rest).push_back(std::move(work));
      queues_[stream] = std::move(rest);
    }
    for (Work& work : due) work.run();
  }
  std::atomic<bool> is_on_{false};
  std::atomic<int64_t> number_{0};
  std::mutex mutex_;
  std::map<c10::StreamId, std::vector<Work>> queues_;
};
Late& late() {
  static auto* instance = new Late;
  return *instance;
}

// An error of asynchronous work, which surfaces where the host next waits.
std::mutex g_error_mutex;
std::string g_error;
void surface_error() {
  const std::lock_guard lock(g_error_mutex);
  if (g_error.empty()) return;
  const std::string text = std::exchange(g_error, "");
  TORCH_CHECK(false, text);
}

// An error that ends the device, as a failed assert ends a CUDA context: whatever asks it for work,
// or about work, raises from then on. Memory is handed out and views are made all the same.
std::atomic<bool> g_is_dead{false};
void require_life() {
  if (!g_is_dead) return;
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710,
                              "sealed device: device-side assert triggered");
}

std::atomic<int64_t> g_slow_queries{0};
struct Event {
  c10::StreamId stream;
  int64_t number;
  int64_t queries;  // that are still answered with "not yet"
};

struct SealedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    counts().add("alloc");
    void* data = bytes == 0 ? nullptr : arena().take(bytes, t_stream[t_device]);
    return {data, data, &give, c10::Device(kSealed, t_device)};
  }
  static void give(void* data) { arena().give(data); }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(arena().own(to), arena().own(from), bytes);
  }
};
SealedAllocator g_allocator;
REGISTER_ALLOCATOR(kSealed, &g_allocator);

// Freed memory is not given back, but filled: a copy that is late must not crash the test.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const std::lock_guard lock(mutex());
    auto& spare = spares()[bytes];
    void* data = spare.empty() ? malloc(std::max<size_t>(bytes, 1)) : spare.back();
    if (!spare.empty()) spare.pop_back();
    live()[data] = bytes;
    return {data, data, &give, c10::Device(c10::kCPU)};
  }
  static void give(void* data) {
    const std::lock_guard lock(mutex());
    // CUDA's asks the device for an event then, within a destructor.
    if (g_is_dead) counts().add("pinned memory freed while dead");
    const size_t bytes = live()[data];
    live().erase(data);
    memset(data, 0xff, bytes);
    spares()[bytes].push_back(data);
  }
  static bool holds(const void* data) {
    const std::lock_guard lock(mutex());
    auto after = live().upper_bound(const_cast<void*>(data));
    if (after == live().begin()) return false;
    --after;
    return data < static_cast<char*>(after->first) + std::max<size_t>(after->second, 1);
  }
  static std::mutex& mutex() {
    static auto* instance = new std::mutex;
    return *instance;
  }
  static std::map<void*, size_t>& live() {
    static auto* instance = new std::map<void*, size_t>;
    return *instance;
  }
  static std::map<size_t, std::vector<void*>>& spares() {
    static auto* instance = new std::map<size_t, std::vector<void*>>;
    return *instance;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
PinnedAllocator g_pinned;
std::atomic<bool> g_has_pinned{true};

// ---------------------------------------------------------------- guard, hooks, generators

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSealed; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return {kSealed, t_device}; }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) t_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) t_device = d.index();
  }
  c10::Stream getStream(c10::Device d) const override {
    const auto index = d.has_index() ? d.index() : t_device;
    return stream(index, t_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return stream(d.has_index() ? d.index() : t_device, 0);
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    static std::atomic<int64_t> next{1};
    return stream(d.has_index() ? d.index() : t_device, next++);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto before = getStream(s.device());
    t_stream[s.device_index()] = s.id();
    return before;
  }
  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    counts().add("event record");
    require_life();
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {s.id(), late().number(), g_slow_queries};
  }
  void block(void* event, const c10::Stream& s) const override {
    counts().add("event block");
    require_life();
    if (event == nullptr) return;
    const auto& point = *static_cast<Event*>(event);
    if (point.stream != s.id()) late().run_to(point.stream, point.number);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    require_life();
    auto& point = *static_cast<Event*>(event);
    if (point.queries-- > 0) return false;
    // What has not run yet does so by itself, some time: where that is not said, never.
    return late().has_run_to(point.stream, point.number);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    require_life();
    const auto& point = *static_cast<Event*>(event);
    // A real device's host does not wait for what is over.
    counts().add(queryEvent(event) ? "look at event" : "sync event");
    late().run_to(point.stream, point.number);
    surface_error();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    counts().add("sync stream");
    require_life();
    late().run_to(s.id(), late().number());
    surface_error();
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    counts().add("sync device");
    require_life();
    late().run_all();
    surface_error();
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  static c10::Stream stream(c10::DeviceIndex index, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSealed, index), id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

at::Generator& generator(c10::DeviceIndex index) {
  static auto* all = new std::vector<at::Generator>{at::detail::createCPUGenerator(11),
                                                    at::detail::createCPUGenerator(22)};
  return (*all)[index < 0 ? t_device : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override {
    return generator(i);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { t_device = d; }
  c10::DeviceIndex getCurrentDevice() const override { return t_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return std::exchange(t_device, d);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return std::exchange(t_device, d);
  }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(g_has_pinned, "sealed device: no pinned memory");
    return &g_pinned;
  }
  c10::Device getDeviceFromPtr(void*) const override { return {kSealed, t_device}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = g_allocator.allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept != 0) memcpy(arena().own(fresh.get()), arena().own(storage.data()), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---------------------------------------------------------------- operations over the same memory

// Gives CPU tensors over the memory of the device's, and takes results back.
class Aliases {
 public:
  at::Tensor host(const at::Tensor& t) {
    if (!t.defined() || t.device().type() != kSealed) return t;
    if (!device_.has_value()) device_ = t.device();
    c10::StorageImpl* theirs = t.storage().unsafeGetStorageImpl();
    auto& mine = storages_[theirs];
    if (!mine.first) {
      mine.first = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(),
          c10::DataPtr(arena().own(t.storage().data()), c10::kCPU), c10::GetCPUAllocator(), true));
      mine.second = t.storage();
    }
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(mine.first), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    if (t.is_conj()) made._set_conj(true);
    if (t.is_neg()) made._set_neg(true);
    pairs_.emplace_back(t, made);
    return made;
  }
  // Passes on what an operation did to the sizes and the storages of its arguments.
  void settle() {
    for (auto& [theirs, mine] : storages_) {
      if (mine.first.data() == arena().own(theirs->data()) &&
          mine.first.nbytes() == theirs->nbytes()) {
        continue;
      }
      const c10::DeviceGuard guard(*device_);
      auto fresh = g_allocator.allocate(mine.first.nbytes());
      if (mine.first.nbytes() != 0) {
        memcpy(arena().own(fresh.get()), mine.first.data(), mine.first.nbytes());
      }
      theirs->set_data_ptr_noswap(std::move(fresh));
      theirs->set_nbytes(mine.first.nbytes());
    }
    for (auto& [theirs, mine] : pairs_) {
      const bool same = theirs.sizes() == mine.sizes() && theirs.strides() == mine.strides() &&
                        theirs.storage_offset() == mine.storage_offset();
      if (!same) {
        theirs.unsafeGetTensorImpl()->set_sizes_and_strides(mine.sizes(), mine.strides(),
                                                            mine.storage_offset());
      }
    }
  }
  at::Tensor device(const at::Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    for (auto& [theirs, mine] : pairs_) {
      if (mine.is_same(t)) return theirs;
    }
    c10::Storage storage;
    for (auto& [theirs, mine] : storages_) {
      if (mine.first.unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl()) {
        storage = mine.second;
      }
    }
    if (!storage) {
      const c10::DeviceGuard guard(*device_);
      const size_t bytes = t.storage().nbytes();
      auto fresh = g_allocator.allocate(bytes);
      if (bytes != 0) memcpy(arena().own(fresh.get()), t.storage().data(), bytes);
      storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), bytes, std::move(fresh), &g_allocator, true));
    }
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.is_conj()) made._set_conj(true);
    if (t.is_neg()) made._set_neg(true);
    return made;
  }
  void on(c10::Device device) {
    if (!device_.has_value()) {
      device_ = device.has_index() ? device : c10::Device(kSealed, t_device);
    }
  }
  bool is_on_device() const { return device_.has_value(); }
  c10::DeviceIndex index() const { return device_.has_value() ? device_->index() : 0; }

 private:
  std::optional<c10::Device> device_;
  std::map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> storages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

bool makes_the_host_wait(const std::string& name) {
  static const std::set<std::string> kNames = {
      "aten::nonzero",    "aten::masked_select", "aten::_unique2",
      "aten::unique_dim", "aten::equal",         "aten::unique_consecutive",
      "aten::_unique",    "aten::bincount",      "aten::repeat_interleave"};
  return kNames.count(name) != 0;
}

bool takes_generator(const c10::Argument& argument) {
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  return optional != nullptr && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// The CPU wraps a number that does not fit into a tensor of small integers; some devices refuse.
void refuse_wide_scalar(const std::string& name, const at::Tensor& tensor, const at::Scalar& by) {
  if (!by.isIntegral(/*includeBool=*/false)) return;
  const int64_t value = by.toLong();
  const bool is_too_wide = (tensor.scalar_type() == at::kChar && value != int8_t(value)) ||
                           (tensor.scalar_type() == at::kShort && value != int16_t(value)) ||
                           (tensor.scalar_type() == at::kInt && value != int32_t(value));
  TORCH_CHECK(!is_too_wide, name, ": ", value, " does not fit into ", tensor.scalar_type());
}

// The memory that an operation writes, and its bytes before: to be written late.
struct Written {
  explicit Written(const at::Tensor& t, bool is_new = false) {
    if (!t.defined() || t.device().type() != kSealed || t.storage().nbytes() == 0) return;
    memory = static_cast<char*>(arena().own(t.storage().data()));
    before.assign(t.storage().nbytes(), '\xff');
    if (!is_new) before.assign(memory, t.storage().nbytes());
  }
  void defer(c10::StreamId stream) {
    if (memory == nullptr) return;
    // Only what has changed: others may write to the rest of the storage meanwhile.
    for (size_t at = 0; at < before.size();) {
      if (memory[at] == before[at]) {
        ++at;
        continue;
      }
      size_t end = at;
      while (end < before.size() && memory[end] != before[end]) ++end;
      late().put(stream, false, [to = memory + at, bytes = std::string(memory + at, end - at)] {
        memcpy(to, bytes.data(), bytes.size());
      });
      memcpy(memory + at, before.data() + at, end - at);
      at = end;
    }
  }
  char* memory = nullptr;
  std::string before;
};

void run(const c10::OperatorHandle& op, const c10::OperatorHandle& called,
         torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  const auto& returns = op.schema().returns();
  const bool is_view = std::any_of(returns.begin(), returns.end(), [](const auto& each) {
    return each.alias_info() != nullptr && !each.alias_info()->isWrite();
  });
  if (!is_view) require_life();
  counts().add(is_view ? "view" : "op");
  counts().add(name);
  if (makes_the_host_wait(name)) counts().add("wait: " + name);
  const c10::StreamId stream = t_stream[t_device];
  late().run(stream);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  if (arguments.size() >= 2 && (*stack)[first].isTensor() && (*stack)[first + 1].isScalar()) {
    refuse_wide_scalar(name, (*stack)[first].toTensor(), (*stack)[first + 1].toScalar());
  }
  Aliases aliases;
  std::vector<Written> written;
  const bool is_late = late().wanted(stream) && !is_view;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = (*stack)[first + i];
    const auto* alias = arguments[i].alias_info();
    if (!is_late || alias == nullptr || !alias->isWrite()) continue;
    if (value.isTensor()) written.emplace_back(value.toTensor());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& t : value.toTensorVector()) written.emplace_back(t);
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = aliases.host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(aliases.host(t));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        list.push_back(t.has_value() ? std::optional(aliases.host(*t)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kSealed) {
      aliases.on(value.toDevice());
      value = c10::Device(c10::kCPU);
    }
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isNone() && takes_generator(arguments[i])) value = generator(aliases.index());
  }
  called.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  aliases.settle();
  const size_t num_returns = op.schema().returns().size();
  for (size_t i = stack->size() - num_returns; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = aliases.device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(aliases.device(t));
      value = list;
    }
    if (!is_late || returns[i + num_returns - stack->size()].alias_info() != nullptr) continue;
    if (value.isTensor()) written.emplace_back(value.toTensor(), /*is_new=*/true);
    if (!value.isTensorList()) continue;
    for (const at::Tensor& t : value.toTensorVector()) written.emplace_back(t, /*is_new=*/true);
  }
  for (Written& each : written) each.defer(stream);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run(op, op, stack); }

void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto cpu = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  counts().add("op");
  const size_t first = stack->size() - op.schema().arguments().size();
  Aliases aliases;
  for (size_t i = first; i < stack->size(); ++i) {
    if ((*stack)[i].isTensor()) (*stack)[i] = aliases.host((*stack)[i].toTensor());
  }
  cpu.callBoxed(stack);
  stack->back() = aliases.device(stack->back().toTensor());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> mask) {
  counts().add("op");
  Aliases a;
  const c10::SymInt bias = weight.sym_size(0);
  auto [x, w, b] = at::convolution_backward_symint(
      a.host(grad), a.host(input), a.host(weight), c10::SymIntArrayRef(&bias, 1), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  return {a.device(x), a.device(w), a.device(b)};
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &g_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &g_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  require_life();
  const bool is_read = from.device().type() == kSealed, is_written = to.device().type() == kSealed;
  bool blocks = false;
  if (is_read && is_written) {
    counts().add("op");
    counts().add("copy on device");
  } else if (is_written) {
    counts().add("copy to device");
    // From pageable memory the host waits until it has been staged.
    blocks = !non_blocking || !from.is_pinned();
    if (blocks) counts().add("blocking copy to device");
  } else {
    counts().add("copy to host");
    counts().add("bytes to host", static_cast<int64_t>(from.nbytes()));
    blocks = !non_blocking || !to.is_pinned();
    if (blocks) counts().add("wait: copy to host");
  }
  const c10::StreamId stream = t_stream[(is_read ? from : to).device().index()];
  late().run(stream);
  if (blocks && is_read) {
    late().run_to(stream, late().number());
    surface_error();
  }
  const bool is_plain = from.is_contiguous() && to.is_contiguous() && from.nbytes() != 0 &&
                        from.dtype() == to.dtype() && from.is_neg() == to.is_neg() &&
                        from.is_conj() == to.is_conj();
  const auto place = [](const at::Tensor& t) {
    auto* first = static_cast<char*>(t.storage().mutable_data()) +
                  t.storage_offset() * static_cast<int64_t>(t.itemsize());
    return t.device().type() == kSealed ? static_cast<char*>(arena().own(first)) : first;
  };
  if (late().is_on() && !blocks && is_plain && is_read != is_written) {
    if (is_read) {  // the bytes of now, which arrive late
      late().put(stream, true, [to = place(to), bytes = std::string(place(from), from.nbytes())] {
        memcpy(to, bytes.data(), bytes.size());
      });
    } else {
      late().put(stream, false,
                 [to = place(to), from = place(from), n = from.nbytes()] { memcpy(to, from, n); });
    }
    return to;
  }
  std::optional<Written> written;
  if (is_read && is_written && late().wanted(stream)) written.emplace(to);
  {
    Aliases aliases;
    const at::AutoDispatchBelowADInplaceOrView below;
    aliases.host(to).copy_(aliases.host(from));
  }
  if (written) written->defer(stream);
  return to;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  counts().add("record_stream");
  arena().used_on(self.storage().mutable_data(), stream.id());
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  counts().add("wait: item");
  require_life();
  late().run(t_stream[self.device().index()]);
  surface_error();
  Aliases aliases;
  return at::native::_local_scalar_dense_cpu(aliases.host(self));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}
at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  const int64_t n = static_cast<int64_t>(source.nbytes()) / self.itemsize();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef{n}, c10::IntArrayRef{1}, 0);
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(),
                                                    source.storage_offset());
  return self;
}

// torch asks for this one on PrivateUse1; it has no argument for a generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  const double kept = train.value_or(true) ? 1 - p : 1;
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(kept, generator(input.device().index()));
  return {input * mask * (kept == 0 ? 0 : 1 / kept), mask};
}

int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                   const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // the composite of operations
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", convolution_backward);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using at::autocast::CastPolicy;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  arena();
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &g_before);
  m.def("counts", [] {
    const std::lock_guard lock(counts().mutex);
    std::map<std::string, int64_t> all = counts().numbers;
    all["host faults"] = g_faults;
    return all;
  });
  m.def("reset", [] {
    const std::lock_guard lock(counts().mutex);
    counts().numbers.clear();
    g_faults = 0;
  });
  m.def("traces", [] {
    std::vector<std::vector<std::string>> all;
    for (int i = 0; i < std::min<int64_t>(g_faults, kMaxTraces); ++i) {
      char** lines = backtrace_symbols(g_traces[i], g_trace_sizes[i]);
      all.emplace_back(lines, lines + g_trace_sizes[i]);
      free(lines);
    }
    return all;
  });
  m.def("seal", [] { arena().seal(); });
  m.def("memory", [] { return std::make_pair(arena().used(), arena().peak()); });
  m.def("reset_peak", [] { arena().reset_peak(); });
  m.def("get_device", [] { return static_cast<int>(t_device); });
  m.def("set_device", [](int d) { t_device = static_cast<c10::DeviceIndex>(d); });
  m.def("synchronize", [] {
    counts().add("sync device");
    require_life();
    late().run_all();
    surface_error();
  });
  m.def("set_late", [](bool on) { late().set(on); });
  m.def("set_pinned", [](bool on) { g_has_pinned = on; });
  m.def("set_slow_queries", [](int64_t count) { g_slow_queries = count; });
  m.def("set_error", [](const std::string& text) {
    const std::lock_guard lock(g_error_mutex);
    g_error = text;
  });
  // From an address as the program has it to the one where the device's own operations see it.
  m.def("own_offset", [] { return arena().own_offset(); });
  m.def("set_dead", [](bool is_dead) { g_is_dead = is_dead; });
  m.def("set_limit", [](size_t bytes) { arena().limit(bytes); });
  m.def("get_state", [](int d) { return generator(static_cast<c10::DeviceIndex>(d)).get_state(); });
  m.def("set_state", [](int d, const at::Tensor& state) {
    generator(static_cast<c10::DeviceIndex>(d)).set_state(state);
  });
  m.def("seed_all", [](uint64_t seed) {
    for (int i = 0; i < kNumDevices; ++i) {
      generator(static_cast<c10::DeviceIndex>(i)).set_current_seed(seed);
    }
  });
}
