#include "launch.cuh"
#include "scan_kernel.h"

namespace overflow_fast::cuda {

cudaError_t ask_fits(Target& target) {
  cudaError_t error = ask_fit<SmallList>(target.small);
  if (error == cudaSuccess) error = ask_fit<MediumList>(target.medium);
  if (error == cudaSuccess && target.takes_large_lists) error = ask_fit_of_large(target.large);
  return error;
}

cudaError_t launch_scan(const View* views, int64_t count, Slot* slots, const Target& target,
                        SeenStep seen) {
  if (count <= SmallList::kMaxItems && target.takes_small_lists) {
    SmallList list;
    if (plan(views, count, slots, seen, list) == count) return launch(list, target, target.small);
  }
  while (count > 0) {
    int64_t taken = 0;
    cudaError_t error = cudaSuccess;
    if (count > MediumList::kMaxItems && target.takes_large_lists) {
      LargeList list;
      taken = plan(views, count, slots, seen, list);
      error = launch_large(list, target);
    } else {
      MediumList list;
      taken = plan(views, count, slots, seen, list);
      error = launch(list, target, target.medium);
    }
    if (error != cudaSuccess) return error;
    views += taken;
    slots += taken;
    if (seen.slots != nullptr) seen.slots += taken;
    count -= taken;
  }
  return cudaSuccess;
}

}  // namespace overflow_fast::cuda
