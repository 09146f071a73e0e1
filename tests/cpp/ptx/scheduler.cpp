// Who runs when.
//
// 1. A launch takes kBlocksAtOnce blocks at a time, as a GPU would that has room for so many.
// 2. A warp that may run is drawn, and its threads run one after another, from a drawn one on, each
//    until it comes to a barrier, an exchange, or its end.
// 3. At an exchange all lanes of a warp are in the same place, else the launch fails. The warp may
//    run on.
// 4. At a barrier all threads of the block are in the same place, in any order of warps. If nobody
//    may run and the block is not done, some threads never come: the launch fails.
//
// State: the blocks under way, the warps of them that may run, the thread that runs, and the
// generator that draws, for which PTX_SEED is another seed.
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>

#include "../fibers.h"
#include "machine.h"

namespace ptx {

namespace {

enum class Stop { kBarrier, kExchange, kEnd };

struct Runner : fiber::Fiber {
  Thread thread;
  Stop stop;
  int line;  // of the PTX, where it has stopped
  bool vote;
  uint32_t num_exchanges;
};

constexpr uint32_t kBlocksAtOnce = 3;
constexpr unsigned char kLeftThere = 0xcd;  // nobody clears shared memory

}  // namespace

struct Block {
  std::vector<Runner*> runners;
  std::vector<uint64_t> exchanged[2];  // in turn: some lanes read while others are at the next
  std::vector<unsigned char> shared;
  Accesses accesses;
  uint32_t num_arrived = 0, num_ended = 0;
  bool any_vote = false;  // of the last barrier
};

namespace {

std::mt19937_64 generator([] {
  const char* seed = std::getenv("PTX_SEED");
  return seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10);
}());
std::deque<Runner> runners;  // of all blocks under way; a fiber stays in its place
const Kernel* kernel;
struct Warp {
  Block* block;
  uint32_t first, end;  // threads
};
std::vector<Warp> ready;

Runner& running() { return *static_cast<Runner*>(fiber::running); }

void stop(Stop why, int line) {
  running().stop = why;
  running().line = line;
  fiber::hand_over();
}

void run_kernel() {
  kernel->run(running().thread);
  running().stop = Stop::kEnd;
}

[[noreturn]] void fail_at(const Thread& thread, const char* what, int line) {
  int status = 0;
  char* name = abi::__cxa_demangle(kernel->name, nullptr, nullptr, &status);
  std::printf("FAIL: %s: line %d of the PTX for sm_%d, thread %u of block %u, %s\n", what, line,
              architecture, thread.tid, thread.ctaid, status == 0 ? name : kernel->name);
  std::fflush(stdout);
  std::_Exit(3);
}

void start(Block& block, uint32_t id, uint32_t num_blocks, uint32_t num_threads, uint32_t first,
           uint64_t parameter) {
  block.shared.assign(kernel->shared_bytes + 16, kLeftThere);
  block.accesses.shared.resize(kernel->shared_bytes);
  for (auto& each : block.exchanged) each.resize(num_threads + kLanes);
  const uint64_t shared = (reinterpret_cast<uint64_t>(block.shared.data()) + 15) / 16 * 16;
  for (uint32_t i = 0; i < num_threads; ++i) {
    Runner& runner = runners[first + i];
    runner.thread = {i, id, num_threads, num_blocks, shared, parameter, kernel->own, &block};
    runner.num_exchanges = 0;
    block.runners.push_back(&runner);
  }
  for (uint32_t i = 0; i < num_threads; i += kLanes) {
    ready.push_back({&block, i, std::min(i + kLanes, num_threads)});
  }
}

// Runs each thread of a warp up to where it stops. True if the warp may run on.
bool run_warp(const Warp& warp) {
  Block& block = *warp.block;
  const uint32_t count = warp.end - warp.first;
  const auto order = static_cast<uint32_t>(generator());
  // From any lane on, up or down.
  const uint32_t step = order >> 31 ? 1 : count - 1;
  uint32_t lane = order % count, num_exchanging = 0, num_ended = 0;
  for (uint32_t i = 0; i < count; ++i) {
    Runner& runner = *block.runners[warp.first + lane];
    fiber::resume(runner);
    num_exchanging += runner.stop == Stop::kExchange;
    num_ended += runner.stop == Stop::kEnd;
    lane = lane + step < count ? lane + step : lane + step - count;
  }
  const Runner& first = *block.runners[warp.first];
  if (num_exchanging == 0) {
    block.num_arrived += count - num_ended;
    block.num_ended += num_ended;
    return false;
  }
  for (uint32_t i = warp.first; i < warp.end; ++i) {
    const Runner& other = *block.runners[i];
    if (other.stop == Stop::kExchange && count == kLanes && other.line == first.line) continue;
    fail_at(other.thread, "an exchange that not all lanes of the warp reach", first.line);
  }
  return true;
}

// Where all threads are at the barrier, lets them run on.
void release_barrier(Block& block) {
  if (block.num_arrived != block.runners.size()) return;
  const Runner& first = *block.runners[0];
  block.any_vote = false;
  for (const Runner* each : block.runners) {
    if (each->line != first.line) fail_at(each->thread, "barriers in two places", each->line);
    block.any_vote |= each->vote;
  }
  block.num_arrived = 0;
  ++block.accesses.epoch;
  const auto count = static_cast<uint32_t>(block.runners.size());
  for (uint32_t i = 0; i < count; i += kLanes) {
    ready.push_back({&block, i, std::min(i + kLanes, count)});
  }
}

void require_end(const Block& block) {
  if (block.num_ended == block.runners.size()) return;
  for (const Runner* each : block.runners) {
    if (each->stop != Stop::kBarrier) continue;
    fail_at(each->thread, "a barrier that not all threads reach", each->line);
  }
}

}  // namespace

void launch(const Kernel& launched, uint32_t num_blocks, uint32_t num_threads,
            const void* parameter) {
  kernel = &launched;
  fiber::body = run_kernel;
  forget_writes();
  std::vector<uint64_t> copy(launched.parameter_bytes / 8 + 1);
  std::memcpy(copy.data(), parameter, launched.parameter_bytes);
  const auto copied = reinterpret_cast<uint64_t>(copy.data());
  running_parameter = {copied, copied + launched.parameter_bytes};
  if (runners.size() < kBlocksAtOnce * num_threads) runners.resize(kBlocksAtOnce * num_threads);
  for (uint32_t begin = 0; begin < num_blocks; begin += kBlocksAtOnce) {
    std::vector<Block> blocks(std::min(kBlocksAtOnce, num_blocks - begin));
    for (uint32_t i = 0; i < blocks.size(); ++i) {
      start(blocks[i], begin + i, num_blocks, num_threads, i * num_threads, copied);
    }
    while (!ready.empty()) {
      const size_t drawn = generator() % ready.size();
      const Warp warp = ready[drawn];
      if (run_warp(warp)) continue;
      ready[drawn] = ready.back();
      ready.pop_back();
      release_barrier(*warp.block);
    }
    for (const Block& block : blocks) require_end(block);
  }
}

bool barrier(Thread& thread, bool vote, int line) {
  running().vote = vote;
  stop(Stop::kBarrier, line);
  return thread.block->any_vote;
}

const uint64_t* exchange(Thread& thread, uint64_t value, int line) {
  auto& values = thread.block->exchanged[running().num_exchanges++ % 2];
  values[thread.tid] = value;
  stop(Stop::kExchange, line);
  return values.data() + thread.tid / kLanes * kLanes;
}

void fail(const char* what, int line) { fail_at(running().thread, what, line); }

Accesses& accesses_of(const Thread& thread) { return thread.block->accesses; }

}  // namespace ptx
