// Alternatives that only a measurement on a GPU can decide between, free of torch. An environment
// variable selects each for the measurement; benchmarks/decisions.py lists them with the rule that
// decides. Without the variable the first value is used.
//
// | variable                       | values                | selects                                |
// |--------------------------------|-----------------------|----------------------------------------|
// | OVERFLOW_FAST_CUDA_BLOCKS      | 0, any number above 0 | blocks on each multiprocessor; 0: as   |
// |                                |                       | many as fit                            |
// | OVERFLOW_FAST_CUDA_TURN        | 0, any number above 0 | chunks that a block reads in a row; 0: |
// |                                |                       | its share of a list, once              |
// | OVERFLOW_FAST_CUDA_SPLIT       | 1, 0                  | two launches for a list of runs and    |
// |                                |                       | rows, where the runs fill the device   |
// | OVERFLOW_FAST_CUDA_SMALL_LISTS | 1, 0                  | parameters for 4 tensors, beside 88    |
// | OVERFLOW_FAST_CUDA_LARGE_LISTS | 1, 0                  | parameters for 984 tensors, beside 88  |
// | OVERFLOW_FAST_STEP_END         | torch, kernel, mapped | see StepEnd                            |
//
// A block's threads and a thread's loads are compiled in (OF_CUDA_* in cuda/work_list.h).
#pragma once

#include <cstdint>

namespace overflow_fast {

// How a step's slots leave the device: folded into flags, copied to the host, reset.
enum class StepEnd : uint8_t {
  kTorch,   // torch operations for each of the three
  kKernel,  // a copy, then one kernel that folds and resets
  kMapped,  // one kernel for all: it writes the slots into mapped pinned memory, then a number
            // that the host polls without asking the driver
};

struct Variants {
  int cuda_blocks = 0;
  int cuda_turn = 0;
  bool splits_lists = true;
  bool has_small_lists = true;
  bool has_large_lists = true;
  StepEnd step_end = StepEnd::kTorch;
};

// Throws std::invalid_argument for an unknown value: a measurement of another variant than the one
// asked for would decide wrongly. Each object that has slots or launches calls this once.
Variants read_variants();

}  // namespace overflow_fast
