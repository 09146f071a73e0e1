#include "variants.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace overflow_fast {

namespace {

std::string asked(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

[[noreturn]] void refuse(const char* variable, const std::string& expected) {
  throw std::invalid_argument(std::string(variable) + " must be " + expected + ", got " +
                              asked(variable));
}

// The index of the variable's value among `values`; 0 if it is not set.
int choice(const char* variable, std::initializer_list<const char*> values) {
  const std::string value = asked(variable);
  if (value.empty()) return 0;
  const auto* found = std::find(values.begin(), values.end(), value);
  if (found != values.end()) return static_cast<int>(found - values.begin());
  std::string names;
  for (const char* name : values) names += (names.empty() ? "" : " or ") + std::string(name);
  refuse(variable, names);
}

// The variable's value, a whole number of at most four digits; 0 if it is not set.
int number(const char* variable) {
  const std::string value = asked(variable);
  if (value.empty()) return 0;
  const bool is_number =
      value.size() <= 4 && value.find_first_not_of("0123456789") == std::string::npos;
  if (!is_number) refuse(variable, "a number from 0 to 9999");
  return std::stoi(value);
}

}  // namespace

Variants read_variants() {
  Variants variants;
  variants.cuda_blocks = number("OVERFLOW_FAST_CUDA_BLOCKS");
  variants.cuda_turn = number("OVERFLOW_FAST_CUDA_TURN");
  variants.splits_lists = choice("OVERFLOW_FAST_CUDA_SPLIT", {"1", "0"}) == 0;
  variants.has_small_lists = choice("OVERFLOW_FAST_CUDA_SMALL_LISTS", {"1", "0"}) == 0;
  variants.has_large_lists = choice("OVERFLOW_FAST_CUDA_LARGE_LISTS", {"1", "0"}) == 0;
  variants.step_end =
      static_cast<StepEnd>(choice("OVERFLOW_FAST_STEP_END", {"torch", "kernel", "mapped"}));
  return variants;
}

}  // namespace overflow_fast
