// While this lives, hooks that were put on before it record nothing of what its thread runs: code of
// the program that runs within a judgement is no step.
#pragma once

namespace overflow_fast {

class Unwatched {
 public:
  Unwatched() { ++depth_; }
  Unwatched(const Unwatched&) = delete;
  ~Unwatched() { --depth_; }

  // How many of them live in this thread.
  static int depth() { return depth_; }

 private:
  inline static thread_local int depth_ = 0;
};

}  // namespace overflow_fast
