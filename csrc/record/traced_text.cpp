#include "traced_text.h"

#include <charconv>

namespace overflow_fast {

namespace {

constexpr std::string_view kMarks = "#@*(!=: ";

class Reader {
 public:
  Reader(std::string_view text, LabelTable& labels) : rest_(text), labels_(labels) {}

  TracedCall call() {
    TracedCall call{};
    call.kind = frame_kind();
    call.is_root = takes('r');
    call.has_frame = takes('f');
    call.has_loss = takes('l');
    expect(':');
    call.class_name = text();
    while (!rest_.empty()) {
      expect(' ');
      if (takes('u')) {
        call.opaque.push_back(opaque());
      } else {
        call.items.push_back(item());
      }
    }
    return call;
  }

 private:
  FrameKind frame_kind() {
    switch (next()) {
      case 'F': return FrameKind::kForward;
      case 'B': return FrameKind::kBackward;
      case 'R': return FrameKind::kRecorded;
      default: fail();
    }
  }

  py::object opaque() {
    expect(':');
    expect('=');
    return text();
  }

  TracedCall::Item item() {
    TracedCall::Item item{};
    item.kind = EntryKind::kTensor;
    item.number = -1;
    const char kind = next();
    switch (kind) {
      case 'n': item.kind = EntryKind::kNone; break;
      case 'x': item.kind = EntryKind::kNotTensor; break;
      case 'w': item.kind = EntryKind::kNotScanned; break;
      case 't':
      case 'r':
        item.is_new = item.is_passed = true;
        item.is_returned = kind == 'r';
        if (!rest_.starts_with(':')) item.number = number();
        break;
      case 'k':
      case 'g':
        item.is_passed = kind == 'g';
        item.number = number();
        break;
      default: fail();
    }
    expect(':');
    path(item);
    if (kind == 'w') {
      expect(':');
      item.why = text();
    }
    return item;
  }

  void path(TracedCall::Item& item) {
    switch (next()) {
      case 'i':
        item.label = kInputLabel;
        // An argument of a call is at most one index below its inputs.
        item.part = is_argument() ? Part::kInput : Part::kWithinInput;
        break;
      case 'o':
        item.label = kOutputLabel;
        item.part = Part::kOutput;
        break;
      case 'O':
        item.label = kOutputLabel;
        item.part = Part::kWithinOutput;
        break;
      case '=':
        item.label = labels_.name(text().ptr());
        item.part = Part::kNamed;
        break;
      default: fail();
    }
    while (!rest_.empty() && rest_[0] != ':' && rest_[0] != ' ') item.label = part(item.label);
  }

  bool is_argument() const {
    const std::string_view path = rest_.substr(0, rest_.find_first_of(": "));
    return path.empty() || (path[0] == '#' && path.find_first_of(kMarks, 1) == path.npos);
  }

  LabelId part(LabelId parent) {
    switch (next()) {
      case '#': return labels_.index(parent, number());
      case '@': return labels_.key(parent, LabelStyle::kKey, text().ptr());
      case '*': return labels_.key(parent, LabelStyle::kKey, integer().ptr());
      case '(': return labels_.key(parent, LabelStyle::kKey, tuple().ptr());
      case '!': return labels_.key(parent, LabelStyle::kAttribute, text().ptr());
      default: fail();
    }
  }

  int64_t number() {
    const std::string_view digits = word();
    int64_t value = -1;
    const auto [end, error] = std::from_chars(digits.begin(), digits.end(), value);
    if (error != std::errc() || end != digits.end() || value < 0) fail();
    return value;
  }

  py::object integer() {
    const std::string digits(word());
    return py::reinterpret_steal<py::object>(
        checked(PyLong_FromString(digits.c_str(), nullptr, 10)));
  }

  py::tuple tuple() {
    py::tuple items(number());
    for (size_t i = 0; i < items.size(); ++i) {
      switch (next()) {
        case '@': items[i] = text(); break;
        case '*': items[i] = integer(); break;
        default: fail();
      }
    }
    return items;
  }

  py::object text() {
    std::string bytes;
    for (std::string_view coded = word(); !coded.empty();) {
      const bool is_escape = coded[0] == '%';
      if (is_escape && coded.size() < 3) fail();
      bytes += is_escape ? byte(coded.substr(1, 2)) : coded[0];
      coded.remove_prefix(is_escape ? 3 : 1);
    }
    const auto size = static_cast<Py_ssize_t>(bytes.size());
    return py::reinterpret_steal<py::object>(
        checked(PyUnicode_DecodeUTF8(bytes.data(), size, "surrogatepass")));
  }

  char byte(std::string_view digits) const {
    uint8_t value = 0;
    const auto [end, error] = std::from_chars(digits.begin(), digits.end(), value, 16);
    if (error != std::errc() || end != digits.end()) fail();
    return static_cast<char>(value);
  }

  PyObject* checked(PyObject* made) const {
    if (made == nullptr) throw py::error_already_set();
    return made;
  }

  std::string_view word() {
    const std::string_view found = rest_.substr(0, rest_.find_first_of(kMarks));
    rest_.remove_prefix(found.size());
    return found;
  }
  char next() {
    if (rest_.empty()) fail();
    const char found = rest_[0];
    rest_.remove_prefix(1);
    return found;
  }
  bool takes(char mark) {
    const bool is_there = rest_.starts_with(mark);
    if (is_there) rest_.remove_prefix(1);
    return is_there;
  }
  void expect(char mark) {
    if (!takes(mark)) fail();
  }
  [[noreturn]] void fail() const {
    throw py::value_error("overflow_fast::frame cannot read its text constant from here on: " +
                          std::string(rest_));
  }

  std::string_view rest_;
  LabelTable& labels_;
};

}  // namespace

TracedCall parse_traced(std::string_view text, LabelTable& labels) {
  return Reader(text, labels).call();
}

}  // namespace overflow_fast
