// Scans on devices without an implementation of `Device` (device.h): by the function that Python
// has registered for the device's type, such as MPS's kernel, else by torch operations.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace overflow_fast {

enum class TorchScan : uint8_t {
  kAuto,       // the registered function, else torch operations
  kComposite,  // torch operations
};

// True if torch operations scan tensors of this type of device and dtype, and have done so before.
bool is_known_to_scan(const at::Tensor& tensor);

// The reason why a tensor could not be scanned, from the exception being handled. A failure that
// may pass, such as a lack of memory, is not remembered; any other is logged.
std::string remembered_failure(c10::DeviceType device, at::ScalarType dtype);

// `function(slots, first, tensors)` does what the operator overflow_fast::scan does. None
// unregisters it. Called with the GIL.
void register_scan(c10::DeviceType type, pybind11::object function);

// Combines the stat of tensors[i], all readable and on the device of `slots`, into
// slots[first + i]. Throws what the device throws; does not incur a sync.
void scan_there(const at::Tensor& slots, int64_t first, const std::vector<at::Tensor>& tensors,
                TorchScan how);

// The same into slots that were reset, but returns for each tensor the reason why it could not be
// scanned, empty if it was. A dtype that a type of device could not scan is not tried there again.
std::vector<std::string> try_scan_there(const at::Tensor& slots, int64_t first,
                                        const std::vector<at::Tensor>& tensors, TorchScan how);

}  // namespace overflow_fast
