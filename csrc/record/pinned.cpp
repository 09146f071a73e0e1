#include "pinned.h"

#include <ATen/Context.h>

#include "../scan/scan.h"
#include "../scan/tensor_view.h"
#include "../torch_internals/no_dispatch_guard.h"
#include "frame.h"

namespace overflow_fast {

namespace {

at::Tensor without_history(const at::Tensor& tensor) {
  const NoDispatchGuard no_dispatch;
  return tensor.detach();
}

}  // namespace

Pinned::Pinned(const at::Tensor& tensor) : memory_(without_history(tensor)), writes_(tensor) {}

void Pinned::scan(Coverage& coverage) {
  scan_again();
  if (!error) coverage.scanned(memory_);
}

void Pinned::scan_again() {
  View view{};
  if (writes_.has_moved()) {
    error = py::str("pinned memory that was written to again before a copy could be waited for");
  } else if (view_of(memory_, view) != Readability::kReadable) {
    error = py::str("its storage is freed");
  } else {
    stat = scan_here(memory_, view);
  }
}

bool is_pinned(const at::Tensor& tensor) {
  const void* memory = storage_data(tensor);
  return memory != nullptr && at::globalContext().isPinnedPtr(memory);
}

}  // namespace overflow_fast
