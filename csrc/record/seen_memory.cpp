#include "seen_memory.h"

#include <atomic>
#include <mutex>

#include "step_end.h"

namespace overflow_fast {

namespace {

struct Spare {
  std::mutex mutex;
  std::vector<SeenKinds*> chunks[2];  // pageable, pinned
};

Spare& spare() {
  static auto* instance = new Spare;  // devices write to it to the end of the process
  return *instance;
}

SeenKinds* allocate(bool is_pinned) {
  constexpr int64_t kWords = sizeof(SeenKinds) / sizeof(int64_t);
  auto* memory = new at::Tensor(on_host({kChunk, kWords}, is_pinned));
  memory->zero_();
  return static_cast<SeenKinds*>(memory->mutable_data_ptr());
}

// Numbers are of one step of one object, so that no other's are taken for them.
uint32_t next_step() {
  static std::atomic<uint32_t> last{0};
  uint32_t number = ++last;
  return number != 0 ? number : ++last;
}

}  // namespace

Slot SeenRows::stat(int64_t index) const {
  Slot slot;
  const auto chunk = static_cast<size_t>(index / kChunk);
  if (chunk >= chunks_.size()) return slot;
  const volatile SeenKinds& seen = chunks_[chunk][index % kChunk];
  slot.num_nan = seen.nan == step_;
  if (seen.positive_inf == step_) slot.infs |= Slot::kOneInf | Slot::kPositiveInf;
  if (seen.negative_inf == step_) slot.infs |= Slot::kOneInf | Slot::kNegativeInf;
  return slot;
}

SeenMemory::SeenMemory() : step_(next_step()) {}

SeenMemory::~SeenMemory() {
  const std::lock_guard lock(spare().mutex);
  auto& chunks = spare().chunks[is_pinned_];
  chunks.insert(chunks.end(), chunks_.begin(), chunks_.end());
}

void SeenMemory::grow(size_t count, bool is_pinned) {
  is_pinned_ = is_pinned;
  while (chunks_.size() < count) {
    SeenKinds* chunk = nullptr;
    {
      const std::lock_guard lock(spare().mutex);
      auto& chunks = spare().chunks[is_pinned];
      if (!chunks.empty()) {
        chunk = chunks.back();
        chunks.pop_back();
      }
    }
    chunks_.push_back(chunk != nullptr ? chunk : allocate(is_pinned));
  }
}

SeenStep SeenMemory::from(int64_t index) const {
  return {chunks_[static_cast<size_t>(index / kChunk)] + index % kChunk, step_};
}

SeenRows SeenMemory::end_step() { return {chunks_, std::exchange(step_, next_step())}; }

}  // namespace overflow_fast
