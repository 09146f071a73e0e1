// The CUDA kernels against the scalar reference, without torch: on a GPU where nvcc compiles this
// file (benchmarks/gpu_check.py), or on the CPU, by their PTX (ptx_check.py); in the emulation where
// g++ does. Prints PASS or the first mismatch. `few` checks a part: for slow tools around it; with
// `share I N`, N programs share the planted values and the random lists out.
#include <cstdio>
#include <memory>

#include "../../csrc/scan/cuda/scan_kernel.h"
#include "../../csrc/scan/cuda/step_end_kernel.h"
#include "device_memory.h"
#include "planted.h"
#include "reference.h"

namespace {

using namespace overflow_fast;

bool checks_few = false;
int64_t share = 0, num_shares = 1;
int64_t num_tensors = 0;

struct Tensor {
  Tensor(Dtype dtype, Shape drawn, int64_t offset, bool keep_small)
      : shape(std::move(drawn)),
        block(offset + shape.span * dtype_info(dtype).itemsize),
        copy(device::allocate(block.bytes)),
        first(block.memory + offset),
        view{copy + offset, dtype, shape.sizes.data(), shape.strides.data(),
             static_cast<int64_t>(shape.sizes.size())} {
    fill(block, keep_small);
  }
  ~Tensor() { device::release(copy); }
  char* at(int64_t element) { return first + element * dtype_info(view.dtype).itemsize; }
  void send() { device::write(copy, block.memory, block.bytes); }

  Shape shape;
  Block block;  // what the host sees
  char* copy;   // what the kernel sees
  char* first;
  View view;
};
using Tensors = std::vector<std::unique_ptr<Tensor>>;

std::unique_ptr<Tensor> draw_tensor(int64_t max_numel) {
  const auto dtype = static_cast<Dtype>(draw(0, static_cast<int64_t>(Dtype::kCount) - 1));
  // Mostly aligned to the element, as torch's tensors are.
  const int64_t offset = draw(0, 17) * (draw(0, 7) == 0 ? 1 : dtype_info(dtype).itemsize);
  return std::make_unique<Tensor>(dtype, draw_shape(max_numel), offset, draw(0, 2) != 0);
}

// The kinds of non-finite values beside each slot are those of the slot.
void require_seen(const SeenKinds& seen, uint32_t step, const Slot& slot) {
  const auto is_right = [&](uint32_t number, uint64_t kind) {
    return number == ((slot.nonfinite_kinds() & kind) != 0 ? step : 0);
  };
  if (is_right(seen.nan, Slot::kNan) && is_right(seen.positive_inf, Slot::kPositiveInf) &&
      is_right(seen.negative_inf, Slot::kNegativeInf)) {
    return;
  }
  std::printf("FAIL: kinds seen in step %u: %u, %u, %u\n", step, seen.nan, seen.positive_inf,
              seen.negative_inf);
  std::exit(1);
}

std::vector<Slot> scan(const std::vector<View>& views, cuda::Target target) {
  const auto bytes = static_cast<int64_t>(views.size() * sizeof(Slot));
  std::vector<Slot> slots(views.size());
  auto* on_device = reinterpret_cast<Slot*>(device::allocate(bytes));
  device::write(on_device, slots.data(), bytes);
  const auto seen_bytes = static_cast<int64_t>(views.size() * sizeof(SeenKinds));
  auto* seen = reinterpret_cast<SeenKinds*>(device::allocate(seen_bytes));
  device::set(seen, 0, seen_bytes);
  constexpr uint32_t kStep = 7;
  device::check(cuda::launch_scan(views.data(), static_cast<int64_t>(views.size()), on_device,
                                  target, {seen, kStep}),
                "the launch");
  device::read(slots.data(), on_device, bytes);
  std::vector<SeenKinds> seen_here(views.size());
  device::read(seen_here.data(), seen, seen_bytes);
  for (size_t i = 0; i < views.size(); ++i) require_seen(seen_here[i], kStep, slots[i]);
  device::release(on_device);
  device::release(seen);
  return slots;
}

cuda::Target draw_target() {
  const int multiprocessors =
      draw(0, 1) ? device::num_multiprocessors() : static_cast<int>(draw(1, 5));
  const bool takes_large = draw(0, 1) == 1 && device::takes_large_lists();
  cuda::Target target{nullptr, multiprocessors,
                      static_cast<int>(draw(0, cuda::kBlocksPerMultiprocessor)), takes_large};
  target.turn = draw(0, 1) ? 0 : static_cast<int>(draw(1, 3));
  target.splits_lists = draw(0, 1) == 1;
  device::check(cuda::ask_fits(target), "what fits");
  return target;
}

bool is_near(uint64_t a, uint64_t b) { return (a > b ? a - b : b - a) <= 2; }

// A GPU's hypot and its fused multiply-adds may round a complex magnitude otherwise.
bool agree(const DtypeInfo& info, const Slot& a, const Slot& b) {
  if (device::kIsEmulated || !info.is_complex()) return same(a, b);
  return is_near(a.min_key, b.min_key) && is_near(a.max_key, b.max_key) && a.num_nan == b.num_nan &&
         a.infs == b.infs;
}

void print(const char* who, const Slot& slot) {
  std::printf(
      "  %s: min key %llx, max key %llx, %llu nan, infs %llx\n", who,
      static_cast<unsigned long long>(slot.min_key), static_cast<unsigned long long>(slot.max_key),
      static_cast<unsigned long long>(slot.num_nan), static_cast<unsigned long long>(slot.infs));
}

void require(const char* what, const View& view, const Slot& found, const Slot& expected) {
  ++num_tensors;
  if (agree(dtype_info(view.dtype), found, expected)) return;
  std::printf("FAIL: %s: dtype %d (csrc/scan/dtype.h), address %% 16 = %d, sizes and strides", what,
              static_cast<int>(view.dtype),
              static_cast<int>(reinterpret_cast<uintptr_t>(view.data) % 16));
  for (int64_t i = 0; i < view.ndim; ++i) {
    std::printf(" %lld/%lld", static_cast<long long>(view.sizes[i]),
                static_cast<long long>(view.strides[i]));
  }
  std::printf("\n");
  print("found", found);
  print("expected", expected);
  std::exit(1);
}

void check_tensors(const char* what, Tensors& tensors, std::vector<View> views) {
  for (auto& tensor : tensors) tensor->send();
  const std::vector<Slot> slots = scan(views, draw_target());
  for (size_t i = 0; i < views.size(); ++i) {
    Slot expected;
    if (views[i].data != nullptr) reference(views[i], 0, tensors[i]->first, expected);
    require(what, views[i], slots[i], expected);
  }
}

// Tensors of any dtype and layout, some of them empty.
void check_list(int64_t count, int64_t max_numel) {
  Tensors tensors;
  std::vector<View> views;
  const int64_t none = 0, one = 1;
  for (int64_t i = 0; i < count; ++i) {
    tensors.push_back(draw_tensor(max_numel));
    views.push_back(tensors.back()->view);
    if (draw(0, 9) == 0) views.back() = {nullptr, Dtype::kFloat32, &none, &one, 1};
  }
  check_tensors("a list", tensors, views);
}

void check_lists() {
  for (const int64_t count : {0, 1, 4, 5, 88, 89, 984, 985}) {
    if (!checks_few || count < 100) check_list(count, 100);
  }
  const int64_t rounds = checks_few ? 20 : device::kIsEmulated ? 30 : 400 / num_shares;
  for (int64_t round = 0; round < rounds; ++round) {
    check_list(draw(1, round % 10 == 9 ? 200 : 6), round % 20 == 0 ? 60000 : 3000);
  }
}

// Every planted value at every place of tensors that begin anywhere in a vector. The emulation
// plants one of 17, at offsets in turn, which has no divisor in common with the number of values:
// each value gets its turn.
void check_planted(Dtype dtype) {
  const DtypeInfo& info = dtype_info(dtype);
  const int64_t item = info.itemsize;
  const std::vector<int64_t> offsets = {0, item, 16 - item, 1, 16 + 3 * item};
  const int64_t step = checks_few || device::kIsEmulated ? 17 : 1;
  Tensors tensors;
  std::vector<View> views;
  const auto finish = [&] {
    check_tensors("a planted value", tensors, views);
    tensors.clear();
    views.clear();
  };
  int64_t turn = 0;
  for (const int64_t numel : planted_sizes(info)) {
    if (numel == 0) continue;
    for (const int64_t place : planted_positions(info, numel)) {
      for (const uint64_t bits : planted_bits(info)) {
        if (++turn % step != 0 || turn % num_shares != share) continue;
        for (int64_t i = 0; i < static_cast<int64_t>(offsets.size()); ++i) {
          if (step != 1 && i != turn / step % 5) continue;
          auto tensor =
              std::make_unique<Tensor>(dtype, Shape{{numel}, {1}, numel}, offsets[i], true);
          // The real or the imaginary part of a complex element.
          const int64_t part = info.is_complex() && turn / step % 2 ? info.key_bytes : 0;
          std::memcpy(tensor->at(place) + part, &bits, info.key_bytes);
          views.push_back(tensor->view);
          tensors.push_back(std::move(tensor));
          if (views.size() == 80) finish();
        }
      }
    }
  }
  finish();
}

// A run that many blocks share, with a nan before its first vector and one behind its last: each
// is counted once.
void check_ends(Dtype dtype) {
  const DtypeInfo& info = dtype_info(dtype);
  const int64_t numel = 100001;
  Tensor tensor(dtype, {{numel}, {1}, numel}, info.itemsize, true);
  std::memcpy(tensor.at(0), &info.first_nan, info.itemsize);
  std::memcpy(tensor.at(numel - 1), &info.first_nan, info.itemsize);
  tensor.send();
  Slot expected;
  reference(tensor.view, 0, tensor.first, expected);
  require("nans at both ends", tensor.view, scan({tensor.view}, {nullptr, 5, 1, false})[0],
          expected);
}

// Slots of which some are bad, folded into flags as their bits say, copied and reset.
void check_step_end(int64_t count, bool has_flags, bool has_host, bool sets_flags) {
  const int64_t stride = count + draw(0, 5);
  std::vector<Slot> slots(count), host(count);
  std::vector<int64_t> bits(kNumFlags * stride);
  float flags[kNumFlags], expected[kNumFlags];
  for (Slot& slot : slots) {
    slot = {generator(), generator(), draw(0, 9) == 0 ? uint64_t{1} : 0,
            draw(0, 9) == 0 ? static_cast<uint64_t>(draw(0, 40)) : 0};
  }
  for (int64_t& each : bits) each = draw(0, 2) == 0 ? draw(0, 7) : 0;
  for (int flag = 0; flag < kNumFlags; ++flag) {
    flags[flag] = expected[flag] = static_cast<float>(draw(0, 1));
    bool is_up = false;
    for (int64_t i = 0; i < count; ++i) {
      is_up |= (slots[i].nonfinite_kinds() & bits[flag * stride + i]) != 0;
    }
    if (has_flags && (is_up || sets_flags)) expected[flag] = is_up ? 1.0f : 0.0f;
  }
  const auto slot_bytes = static_cast<int64_t>(count * sizeof(Slot));
  const auto bits_bytes = static_cast<int64_t>(bits.size() * sizeof(int64_t));
  uint64_t epoch = 0;
  constexpr uint64_t kNumber = 0x123456789a;
  char* const memory[] = {device::allocate(slot_bytes), device::allocate(slot_bytes),
                          device::allocate(bits_bytes), device::allocate(sizeof flags),
                          device::allocate(sizeof epoch)};
  device::write(memory[0], slots.data(), slot_bytes);
  device::write(memory[2], bits.data(), bits_bytes);
  device::write(memory[3], flags, sizeof flags);
  device::write(memory[4], &epoch, sizeof epoch);
  SlotsEnd end{};
  end.slots = reinterpret_cast<Slot*>(memory[0]);
  end.count = count;
  end.flag_bits = has_flags ? reinterpret_cast<int64_t*>(memory[2]) : nullptr;
  end.flag_stride = stride;
  end.flags = reinterpret_cast<float*>(memory[3]);
  end.sets_flags = sets_flags;
  end.host = has_host ? reinterpret_cast<Slot*>(memory[1]) : nullptr;
  end.epoch = has_host ? reinterpret_cast<uint64_t*>(memory[4]) : nullptr;
  end.number = kNumber;
  device::check(cuda::launch_step_end(end, nullptr), "the launch");
  std::vector<Slot> reset(count);
  device::read(reset.data(), memory[0], slot_bytes);
  device::read(host.data(), memory[1], slot_bytes);
  device::read(flags, memory[3], sizeof flags);
  device::read(&epoch, memory[4], sizeof epoch);
  for (char* each : memory) device::release(each);
  bool is_right = epoch == (has_host ? kNumber : 0);
  for (int64_t i = 0; i < count; ++i) {
    is_right &= same(reset[i], Slot{}) && (!has_host || same(host[i], slots[i]));
  }
  for (int flag = 0; flag < kNumFlags; ++flag) is_right &= flags[flag] == expected[flag];
  if (is_right) return;
  std::printf("FAIL: the end of a step of %lld slots\n", static_cast<long long>(count));
  std::exit(1);
}

void check_step_ends() {
  for (const int64_t count : {1, 31, 32, 33, 500, 1023, 1024, 1025, 4096}) {
    for (int ways = 0; ways < 8; ++ways) check_step_end(count, ways & 1, ways & 2, ways & 4);
  }
}

// More elements than 32 bits count, with nans at the end and where 32 bits overflow.
bool check_huge() {
  const int64_t numel = (int64_t{1} << 31) + 5, stride = 1;
  if (checks_few || device::free_bytes() < numel + (int64_t{1} << 29)) return false;
  const DtypeInfo& info = dtype_info(Dtype::kFloat8E5M2);
  char* memory = device::allocate(numel);
  device::set(memory, 0x11, numel);
  const auto nan = static_cast<unsigned char>(info.first_nan);
  const auto inf = static_cast<unsigned char>(info.inf_key);
  device::write(memory + (int64_t{1} << 31) - 1, &nan, 1);
  device::write(memory + (int64_t{1} << 31), &inf, 1);
  device::write(memory + numel - 1, &nan, 1);
  const View view{memory, info.dtype, &numel, &stride, 1};
  const Slot expected{0x11, nan, 2, Slot::kOneInf | Slot::kPositiveInf};
  const cuda::Target target{nullptr, device::num_multiprocessors(), cuda::kBlocksPerMultiprocessor,
                            device::takes_large_lists()};
  require("2**31 + 5 elements", view, scan({view}, target)[0], expected);
  device::release(memory);
  return true;
}

#if !defined(__CUDACC__)
void check_num_launches(int64_t count, bool takes_large_lists, int expected) {
  const float ones[4] = {1, 1, 1, 1};
  const int64_t size = 4, stride = 1;
  const std::vector<View> views(count, {ones, Dtype::kFloat32, &size, &stride, 1});
  emulation::num_launches = 0;
  scan(views, {nullptr, 1, 1, takes_large_lists});
  if (emulation::num_launches == expected) return;
  std::printf("FAIL: %ld tensors took %d launches, not %d\n", count, emulation::num_launches,
              expected);
  std::exit(1);
}

void check_launches() {
  check_num_launches(0, true, 0);
  for (const int64_t count : {1, 4, 5, 88}) check_num_launches(count, true, 1);
  check_num_launches(1000, true, 2);
  check_num_launches(1000, false, 12);
}
#else
void check_launches() {}
#endif

// A list of runs, rows and single elements, by every way of launching it.
void check_mixed() {
  Tensors tensors;
  std::vector<View> views;
  const auto add = [&](Dtype dtype, Shape shape) {
    tensors.push_back(std::make_unique<Tensor>(dtype, std::move(shape), 0, false));
    views.push_back(tensors.back()->view);
  };
  add(Dtype::kFloat32, {{40000}, {1}, 40000});
  add(Dtype::kInt64, {{300, 33}, {40, 1}, 300 * 40});
  add(Dtype::kFloat32, {{}, {}, 1});
  add(Dtype::kBFloat16, {{3, 7, 500}, {5000, 512, 1}, 15000});
  add(Dtype::kFloat16, {{70000}, {1}, 70000});
  add(Dtype::kComplex64, {{1000}, {1}, 1000});
  for (auto& tensor : tensors) tensor->send();
  for (const int turn : {0, 1, 3, 9999}) {
    for (const bool splits : {false, true}) {
      cuda::Target target{nullptr, 2, 1, false};
      target.turn = turn;
      target.splits_lists = splits;
#if !defined(__CUDACC__)
      emulation::num_launches = 0;
#endif
      const std::vector<Slot> slots = scan(views, target);
#if !defined(__CUDACC__)
      if (emulation::num_launches != 1 + splits) {
        std::printf("FAIL: a mixed list took %d launches\n", emulation::num_launches);
        std::exit(1);
      }
#endif
      for (size_t i = 0; i < views.size(); ++i) {
        Slot expected;
        reference(views[i], 0, tensors[i]->first, expected);
        require("a mixed list", views[i], slots[i], expected);
      }
    }
  }
}

// The quotients of a row's units, of sizes around each power of two.
void check_divisions() {
  for (int64_t power = 2; power <= cuda::kMaxNarrowUnits; power *= 2) {
    for (const int64_t size : {power - 1, power, power + 1}) {
      const auto dim = cuda::UnitDim::of(size, 1, true);
      for (const int64_t unit : {int64_t{0}, size - 1, size, 2 * size - 1, 7 * size,
                                 cuda::kMaxNarrowUnits - 1, cuda::kMaxNarrowUnits}) {
        if (unit > cuda::kMaxNarrowUnits) continue;
        int shift = 0;
        while ((int64_t{1} << shift) < size) ++shift;
        const uint64_t high = (static_cast<uint64_t>(unit) * dim.magic) >> 32;
        const auto found = static_cast<int64_t>((high + static_cast<uint64_t>(unit)) >> shift);
        if (found == unit / size) continue;
        std::printf("FAIL: %lld / %lld\n", static_cast<long long>(unit),
                    static_cast<long long>(size));
        std::exit(1);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  checks_few = argc > 1 && std::strcmp(argv[1], "few") == 0;
  if (argc > 3 && std::strcmp(argv[1], "share") == 0) {
    share = std::atoi(argv[2]);
    num_shares = std::atoi(argv[3]);
  }
  char device_name[300];
  device::describe(device_name, sizeof device_name);
  std::printf("%s\n", device_name);
  std::fflush(stdout);
  check_launches();
  check_divisions();
  check_mixed();
  check_step_ends();
  for (const DtypeInfo& info : kDtypes) {
    if (info.first_nan != kNoKey && !info.is_complex()) check_ends(info.dtype);
    check_planted(info.dtype);
  }
  check_lists();
  const bool has_huge = check_huge();
  std::printf("PASS: %lld tensors on %s%s\n", static_cast<long long>(num_tensors), device_name,
              has_huge ? ", one of 2**31 + 5 elements" : "; none of 2**31 + 5 elements");
  return 0;
}
