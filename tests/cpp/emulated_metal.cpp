// The kernels of MPS for tensors on the CPU, as tests/metal.py calls them.
#define OF_THREADS 32  // fewer fibers, same result
#include "metal_emulation/launch.h"

extern "C" void metal_launch(int64_t capacity, void* slots, const int64_t* words,
                             const void* const* tensors, int64_t num_blocks) {
  metal_emulation::launch(capacity, slots, words, tensors, num_blocks);
}
