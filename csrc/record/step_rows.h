// The extremes of each entry, a row a step: what a flight record keeps.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

#include "frame.h"
#include "underflow.h"

namespace overflow_fast {

class StepRows {
 public:
  // One entry over the steps; its position among all is its index in a row.
  struct Column {
    Place place;  // a recomputed forward's is the forward's
    Dtype dtype;
    int64_t numel;  // when it was first seen

    double limit() const {  // the largest number of its dtype
      return decode_key(dtype_info(dtype), dtype_info(dtype).first_nonfinite() - 1);
    }
  };

  // Everything that ran in a step: slots that are empty were not looked at. Each column is packed
  // into bytes, little-endian where the host is.
  struct Row {
    int64_t number = 0;                                        // which end_step() gave it
    int64_t last_frame = std::numeric_limits<int64_t>::max();  // the order of the step's last frame
    int64_t num_left_out = 0;                                  // entries that there was no room for
    std::vector<Slot> slots;
    std::vector<Dtype> dtypes;
    // -1: not counted; empty: nothing was.
    std::vector<int64_t> zeros;
    std::vector<int64_t> saturated;  // at the largest number of the dtype
    std::vector<int64_t> num_stats;  // how many tensors each slot is made of

    // float32 where that holds every value exactly, else float64; nan: not looked at, or a nan.
    std::string abs_min() const;
    std::string abs_max() const;
    // int64; empty where all are 0.
    std::string num_nan() const;
    std::string num_inf() const;
    std::string num_zero() const { return counts_of(zeros); }
    std::string num_saturated() const { return counts_of(saturated); }
    std::string num_tensors() const;

   private:
    std::string counts_of(std::vector<int64_t> counts) const;
  };

  bool is_on = false;
  bool is_kept = false;  // by a flight record, which ends each row

  void add(const Frame& frame);
  void add(const Underflow::Counts& counts);
  // Ends the row of a step under a number; frames after this one belong to the next.
  void end_step(int64_t number, int64_t last_frame);
  // Begins the row of the step under way again, unless rows are kept.
  void restart();
  const Row& running() const { return rows_.back(); }
  // The oldest row of a step that has ended, or null.
  const Row* oldest() const { return rows_.size() > 1 ? &rows_.front() : nullptr; }
  Row take();
  const std::vector<Column>& columns() const { return columns_; }

 private:
  // Labels that never repeat must not fill the memory of a long run.
  static constexpr size_t kMaxColumns = 1 << 16;
  // Rows of steps that nobody takes.
  static constexpr size_t kMaxRows = 64;
  static constexpr size_t kNoRoom = ~size_t{0};

  // A place whose tensors have several dtypes has a column for each.
  struct Key {
    Place place;
    Dtype dtype;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return PlaceHash()(key.place) + static_cast<size_t>(key.dtype);
    }
  };

  // The index of a column, which is made if there is none; kNoRoom if there are too many.
  size_t column_of(Place place, Dtype dtype, int64_t numel);
  size_t find_column(Place place, Dtype dtype, int64_t numel);
  Row& row_of(int64_t order);
  void fit(Row& row, size_t column) const;

  std::deque<Row> rows_ = std::deque<Row>(1);  // the last one is of the step under way
  std::vector<Column> columns_;
  std::unordered_map<Key, size_t, KeyHash> by_key_;
  std::vector<size_t> followers_;  // by column: the one that came after it
  size_t last_ = 0;
};

}  // namespace overflow_fast
