#include "launch.cuh"

namespace overflow_fast::cuda {

cudaError_t launch_large(const LargeList& list, const Target& target) {
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1201
  return cudaErrorNotSupported;
#else
  return launch(list, target);
#endif
}

}  // namespace overflow_fast::cuda
