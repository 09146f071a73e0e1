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

// Two tasks of this size take as long as one core takes for both. Measured on two cores of a
// Xeon with torch's pool, awake and after 3 ms without work: 512 KiB in 6 us either way awake (9
// asleep), 1 MiB in 8 us on two cores and 11 on one (12 and 15), 2 MiB in 13 and 35 (20 and 53).
constexpr int64_t kMinTaskBytes = 256 * 1024;

// Combines the stat of every element of `view` into `slot`.
void scan(const View& view, const ParallelFor& parallel, Slot& slot);

}  // namespace overflow_fast::cpu
