// The CPU scan of one tensor, free of torch: a view, a slot and a way to run tasks in parallel.
#pragma once

#include "../layout.h"
#include "../stat.h"

namespace overflow_fast::cpu {

// Runs task(0) ... task(num_tasks - 1), possibly in parallel, and returns when all are done.
struct ParallelFor {
  int num_threads;
  void (*run)(int64_t num_tasks, void (*task)(int64_t index, void* context), void* context);
};

// A task below this many bytes costs more to hand out than to do. Measured on two cores of a
// Xeon: handing out two tasks took 5 to 14 us, in which one core reads 0.3 to 1 MiB of cache.
constexpr int64_t kMinTaskBytes = 512 * 1024;

// Combines the stat of every element of `view` into `slot`.
void scan(const View& view, const ParallelFor& parallel, Slot& slot);

}  // namespace overflow_fast::cpu
