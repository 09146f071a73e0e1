// What nvcc's host code and the tests call of libcudart, in its place: kernels run before their
// launch returns, streams are ignored, a GPU's memory is the heap.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "machine.h"

namespace {

// nvcc's code registers each kernel by the address of a function of the host.
std::unordered_map<const void*, const ptx::Kernel*>& registered() {
  static std::unordered_map<const void*, const ptx::Kernel*> by_function;
  return by_function;
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  for (const ptx::Kernel* each = ptx::kernels; each->name != nullptr; ++each) {
    if (std::strcmp(each->name, name) == 0) registered()[function] = each;
  }
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t) {
  const auto found = registered().find(function);
  if (found == registered().end()) return cudaErrorInvalidDeviceFunction;
  const ptx::Kernel& kernel = *found->second;
  const bool is_line = grid.y * grid.z == 1 && block.y * block.z == 1;
  if (!is_line || grid.x == 0 || block.x == 0 ||
      block.x > static_cast<unsigned>(kernel.max_threads)) {
    return cudaErrorInvalidConfiguration;
  }
  ptx::launch(kernel, grid.x, block.x, arguments[0]);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  static char text[40];
  std::snprintf(text, sizeof text, "error %d", static_cast<int>(error));
  return text;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = ptx::allocate(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  if (memory != nullptr) ptx::release(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes != 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

// None for a tensor of 2**31 elements, which would take hours.
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{1} << 30;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 4;  // multiprocessors
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "PTX on the CPU");
  properties->major = ptx::architecture / 10;
  properties->minor = ptx::architecture % 10;
  return cudaSuccess;
}
}
