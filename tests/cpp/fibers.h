// Threads of a GPU as fibers of the CPU: each has a stack of its own, and runs until it hands over
// to whoever has resumed it. One thread of the CPU uses all of them.
//
// A fiber runs `body` once, hands over, and begins anew when it is resumed after that: making one
// calls the system, resuming it does not.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <memory>

namespace fiber {

constexpr size_t kStackBytes = 256 * 1024;  // sanitizers need most of it
// Stacks of one size begin at the same place of a page, and their ends would share a few lines of
// the cache. This is what each is shorter than the one before, of kShifts.
constexpr size_t kShiftBytes = 320, kShifts = 61;

struct Fiber {
  ucontext_t context;
  void* resumed[5];  // of __builtin_setjmp
  std::unique_ptr<char[]> stack;
};

inline void (*body)();
inline Fiber* running;
inline ucontext_t scheduler;
inline void* scheduled[5];
inline size_t num_stacks;

// swapcontext() calls the kernel of the system for the mask of signals, each time; sanitizers must
// be told of each stack, which it does.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kJumps = false;
#else
constexpr bool kJumps = true;
#endif

[[noreturn, gnu::noinline]] inline void jump(void** to) { __builtin_longjmp(to, 1); }

// Of the fiber that runs: goes on behind this call when it is resumed.
[[gnu::noinline]] inline void hand_over() {
  Fiber& fiber = *running;
  if (!kJumps) {
    swapcontext(&fiber.context, &scheduler);
  } else if (__builtin_setjmp(fiber.resumed) == 0) {
    jump(scheduled);
  }
}

inline void run() {
  for (;;) {
    body();
    hand_over();
  }
}

inline void make(Fiber& fiber) {
  fiber.stack.reset(new char[kStackBytes]);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes - num_stacks++ % kShifts * kShiftBytes;
  fiber.context.uc_link = &scheduler;
  makecontext(&fiber.context, run, 0);
}

// Runs a fiber until it hands over. Its context holds addresses within it: it stays in its place.
[[gnu::noinline]] inline void resume(Fiber& fiber) {
  const bool is_new = fiber.stack == nullptr;
  if (is_new) make(fiber);
  running = &fiber;
  if (!kJumps) {
    swapcontext(&scheduler, &fiber.context);
  } else if (__builtin_setjmp(scheduled) == 0) {
    if (is_new) setcontext(&fiber.context);
    jump(fiber.resumed);
  }
}

}  // namespace fiber
