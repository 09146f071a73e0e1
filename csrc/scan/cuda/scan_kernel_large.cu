#include "launch.cuh"

namespace overflow_fast::cuda {

// An older compiler knows no parameters of this size.
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1201
cudaError_t launch_large(LargeList&, const Target&) { return cudaErrorNotSupported; }
cudaError_t ask_fit_of_large(Fit&) { return cudaErrorNotSupported; }
#else
cudaError_t launch_large(LargeList& list, const Target& target) {
  return launch(list, target, target.large);
}
cudaError_t ask_fit_of_large(Fit& fit) { return ask_fit<LargeList>(fit); }
#endif

}  // namespace overflow_fast::cuda
