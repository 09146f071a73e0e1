// Labels of entries as numbers: a path such as output[0]['logits'] is interned once, hooks pass
// its number on, and its text is built only for a report.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace overflow_fast {

namespace py = pybind11;

enum class LabelStyle : uint8_t {
  kName,       // a root: input, output or a parameter's name
  kIndex,      // [0]
  kKey,        // ['logits']
  kAttribute,  // .loss
};

// The role of an entry. In a forward its label's root decides it, else the frame's kind.
enum class Role : uint8_t {
  kInput,
  kOutput,
  kGradOutput,
  kWeight,
  kBuffer,
  kGradient,
  kOptimizerState,
  kRecorded,
};

// A label written out.
struct LabelPart {
  LabelStyle style;
  py::object value;
};
struct Label {
  Role role;
  py::object name;  // of its root
  std::vector<LabelPart> parts;
  bool operator==(const Label& other) const;
};

using LabelId = uint32_t;
constexpr LabelId kInputLabel = 0;
constexpr LabelId kOutputLabel = 1;
constexpr LabelId kParametersLabel = 2;

class LabelTable {
 public:
  LabelTable();

  LabelId index(LabelId parent, int64_t index);
  // `key` is hashed by value, so that keys created in every forward keep their number.
  LabelId key(LabelId parent, LabelStyle style, PyObject* key);
  // The name of a parameter.
  LabelId name(PyObject* name) { return key(kNoParent, LabelStyle::kName, name); }

  // The role that the label's root stands for.
  Role role(LabelId id) const { return nodes_[id].role; }

  // The label of an entry with this role.
  Label label(LabelId id, Role role) const;

 private:
  static constexpr LabelId kNoParent = ~LabelId{0};
  // Keys that never repeat must not fill the memory of a long run, nor the room for names.
  static constexpr size_t kMaxLabels = 1 << 16;
  static constexpr size_t kMaxNames = 1 << 17;

  struct Node {
    LabelId parent;
    LabelStyle style;
    Role role;
    py::object value;
  };
  struct PointerKey {
    LabelId parent;
    PyObject* key;
    bool operator==(const PointerKey& other) const {
      return parent == other.parent && key == other.key;
    }
  };
  struct PointerHash {
    size_t operator()(const PointerKey& k) const {
      return (reinterpret_cast<uintptr_t>(k.key) >> 4) * 0x9e3779b97f4a7c15 + k.parent;
    }
  };

  LabelId add(LabelId parent, LabelStyle style, Role role, py::object value);

  std::vector<Node> nodes_;
  std::vector<std::vector<LabelId>> by_index_;  // [parent][index] -> id + 1, 0 if none
  std::unordered_map<PointerKey, LabelId, PointerHash> by_pointer_;
  py::dict by_value_;  // (parent, style, key) -> id
};

}  // namespace overflow_fast
