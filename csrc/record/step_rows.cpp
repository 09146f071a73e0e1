#include "step_rows.h"

#include <algorithm>
#include <utility>

namespace overflow_fast {

namespace {

double magnitude(const Slot& slot, Dtype dtype, uint64_t key) {
  if (slot.is_empty() || slot.has_nan()) return std::nan("");
  return decode_key(dtype_info(dtype), key);
}

template <class T>
std::string packed(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <class T>
std::vector<T> magnitudes(const StepRows::Row& row, uint64_t Slot::* key, bool& is_exact) {
  std::vector<T> values(row.slots.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = magnitude(row.slots[i], row.dtypes[i], row.slots[i].*key);
    values[i] = static_cast<T>(value);
    is_exact &= std::isnan(value) || static_cast<double>(values[i]) == value;
  }
  return values;
}

std::string pack_magnitudes(const StepRows::Row& row, uint64_t Slot::* key) {
  bool is_exact = true;
  const std::vector<float> narrow = magnitudes<float>(row, key, is_exact);
  return is_exact ? packed(narrow) : packed(magnitudes<double>(row, key, is_exact));
}

template <class Count>
std::string pack_counts(const StepRows::Row& row, Count count) {
  std::vector<int64_t> counts(row.slots.size());
  uint64_t any = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    counts[i] = static_cast<int64_t>(count(row.slots[i]));
    any |= static_cast<uint64_t>(counts[i]);
  }
  return any != 0 ? packed(counts) : std::string();
}

}  // namespace

std::string StepRows::Row::abs_min() const { return pack_magnitudes(*this, &Slot::min_key); }
std::string StepRows::Row::abs_max() const { return pack_magnitudes(*this, &Slot::max_key); }
std::string StepRows::Row::num_nan() const {
  return pack_counts(*this, [](const Slot& slot) { return slot.num_nan; });
}
std::string StepRows::Row::num_inf() const {
  return pack_counts(*this, [](const Slot& slot) { return slot.num_inf(); });
}
std::string StepRows::Row::num_tensors() const { return packed(num_stats); }
std::string StepRows::Row::counts_of(std::vector<int64_t> counts) const {
  if (!counts.empty()) counts.resize(slots.size(), -1);
  return packed(counts);
}

void StepRows::add(const Frame& frame) {
  if (!is_on) return;
  Row& row = row_of(frame.order);
  const FrameKind kind = frame.is_recomputed() ? FrameKind::kForward : frame.kind;
  for (const Entry& entry : frame.entries) {
    const bool is_real = entry.kind == EntryKind::kTensor && !dtype_info(entry.dtype).is_integer();
    if (!is_real || entry.listing.role == Role::kInput || entry.stat.is_empty()) continue;
    if (entry.listing.only_if_bad && !entry.is_bad()) continue;
    const Place place{kind, frame.module, entry.listing.label};
    const size_t column = column_of(place, entry.dtype, entry.numel);
    if (column == kNoRoom) {
      ++row.num_left_out;
      continue;
    }
    fit(row, column);
    combine(row.slots[column], entry.stat);
    ++row.num_stats[column];
  }
}

// Underflow is counted when a step ends, so it is of the step under way.
void StepRows::add(const Underflow::Counts& counts) {
  if (!is_on) return;
  Place place = counts.place;
  if (place.kind == FrameKind::kRecomputed) place.kind = FrameKind::kForward;
  const size_t column = column_of(place, counts.dtype, counts.numel);
  if (column == kNoRoom) return;
  Row& row = rows_.back();
  fit(row, column);
  const auto add = [column](std::vector<int64_t>& values, int64_t count) {
    if (values.size() <= column) values.resize(column + 1, -1);
    values[column] = std::max<int64_t>(values[column], 0) + count;
  };
  add(row.zeros, counts.num_zero);
  add(row.saturated, counts.num_limit);
}

void StepRows::end_step(int64_t number, int64_t last_frame) {
  rows_.back().number = number;
  rows_.back().last_frame = last_frame;
  rows_.emplace_back();
  rows_.back().slots.reserve(columns_.size());
  rows_.back().dtypes.reserve(columns_.size());
  if (rows_.size() > kMaxRows) rows_.pop_front();
}

void StepRows::restart() {
  if (!is_on || is_kept) return;
  Row& row = rows_.back();
  std::fill(row.slots.begin(), row.slots.end(), Slot{});
  std::fill(row.num_stats.begin(), row.num_stats.end(), 0);
  row.num_left_out = 0;
  row.zeros.clear();
  row.saturated.clear();
}

StepRows::Row StepRows::take() {
  Row row = std::move(rows_.front());
  rows_.pop_front();
  return row;
}

// Steps are alike as a rule: the column that followed the last one in the step before is tried
// first, which needs no look into the table.
size_t StepRows::column_of(Place place, Dtype dtype, int64_t numel) {
  const size_t next = last_ < followers_.size() ? followers_[last_] : 0;
  const bool is_next =
      next < columns_.size() && columns_[next].place == place && columns_[next].dtype == dtype;
  const size_t column = is_next ? next : find_column(place, dtype, numel);
  if (column == kNoRoom) return kNoRoom;
  followers_.resize(columns_.size());
  followers_[last_] = column;
  last_ = column;
  return column;
}

size_t StepRows::find_column(Place place, Dtype dtype, int64_t numel) {
  const auto found = by_key_.find({place, dtype});
  if (found != by_key_.end()) return found->second;
  if (columns_.size() >= kMaxColumns) return kNoRoom;
  columns_.push_back({place, dtype, numel});
  by_key_.emplace(Key{place, dtype}, columns_.size() - 1);
  return columns_.size() - 1;
}

StepRows::Row& StepRows::row_of(int64_t order) {
  return *std::find_if(rows_.begin(), rows_.end() - 1,
                       [order](const Row& row) { return order <= row.last_frame; });
}

void StepRows::fit(Row& row, size_t column) const {
  for (size_t i = row.slots.size(); i <= column; ++i) {
    row.slots.emplace_back();
    row.dtypes.push_back(columns_[i].dtype);
    row.num_stats.push_back(0);
  }
}

}  // namespace overflow_fast
