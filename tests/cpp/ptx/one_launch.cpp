// Launches a kernel by its name, on memory of so many bytes that are 0, and prints them as 32-bit
// words: `one_launch NAME BLOCKS THREADS BYTES`. For tests of the machine itself.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.h"

int main(int, char** argv) {
  const ptx::Kernel* kernel = ptx::kernels;
  while (kernel->name != nullptr && std::strcmp(kernel->name, argv[1]) != 0) ++kernel;
  if (kernel->name == nullptr) return 1;
  const uint64_t bytes = std::strtoull(argv[4], nullptr, 10);
  auto* memory = static_cast<unsigned char*>(ptx::allocate(bytes));
  std::memset(memory, 0, bytes);
  ptx::launch(*kernel, std::atoi(argv[2]), std::atoi(argv[3]), &memory);
  for (uint64_t i = 0; i + 4 <= bytes; i += 4) {
    uint32_t word;
    std::memcpy(&word, memory + i, 4);
    std::printf("%u ", word);
  }
}
