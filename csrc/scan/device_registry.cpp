#include "device_registry.h"

#include <map>
#include <mutex>
#include <utility>

namespace overflow_fast {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<c10::DeviceType, OpenDevice> types;
  std::map<std::pair<c10::DeviceType, int64_t>, Device*> devices;
};

Registry& registry() {
  static auto* instance = new Registry;  // devices outlive every recorder
  return *instance;
}

}  // namespace

void register_device_type(c10::DeviceType type, OpenDevice open) {
  const std::lock_guard lock(registry().mutex);
  registry().types[type] = open;
  // Devices that were opened before stay alive: recorders may still use them.
  std::erase_if(registry().devices, [&](const auto& entry) { return entry.first.first == type; });
}

bool has_kernels(c10::DeviceType type) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().types.find(type);
  return found != registry().types.end() && found->second != nullptr;
}

Device* find_device(c10::Device device) {
  const std::lock_guard lock(registry().mutex);
  const auto type = registry().types.find(device.type());
  if (type == registry().types.end() || type->second == nullptr) return nullptr;
  const int64_t index = device.has_index() ? device.index() : 0;
  Device*& opened = registry().devices[{device.type(), index}];
  if (opened == nullptr) opened = type->second(index);
  return opened;
}

}  // namespace overflow_fast
