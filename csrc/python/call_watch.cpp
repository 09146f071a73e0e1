#include "call_watch.h"

#include <frameobject.h>
#include <pybind11/stl.h>

#ifndef _WIN32
#include <signal.h>
#endif

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace overflow_fast {

namespace py = pybind11;

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// The seconds that this thread has computed; those of the clock where the system does not tell.
double thread_seconds() {
#ifdef CLOCK_THREAD_CPUTIME_ID
  timespec now{};
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0) {
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }
#endif
  return Seconds(Clock::now().time_since_epoch()).count();
}

// A clock holds no infinite time.
Clock::time_point after(Clock::time_point time, double seconds) {
  constexpr double kMost = 1e9;
  return time + std::chrono::duration_cast<Clock::duration>(Seconds(std::min(seconds, kMost)));
}

// What is raised when the time is over may be caught. The code gets this many calls and lines to
// clean up behind itself, and then it is raised again.
constexpr int kGrace = 2000;

// Sees what the thread that began it calls, each before it runs: functions of C and of Python,
// instructions that wait or take without a call, and what audit hooks see. A policy in Python says
// once for each function and each code whether it is to be asked, and raises where one may not run.
// See `explainer/effects/rule.py`.
//
// 1. A profile function sees calls and returns, which cost little.
// 2. A trace function, for which the interpreter looks at each instruction, sees lines and
//    instructions. Up to Python 3.11 it stands only while code runs that needs it.
class CallWatch {
 public:
  // The policy is told of the events of audit hooks that begin with one of `audited`.
  CallWatch(py::object policy, std::vector<std::string> audited)
      : policy_(std::move(policy)), audited_(std::move(audited)) {}
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;
  ~CallWatch() = default;

  // For so many seconds of this thread's time, and of the clock's; then all is refused.
  void begin(double seconds, double clock_seconds);
  void end();

  // From here on everything is refused, but for `kGrace` events at a time.
  void refuse_all() {
    num_since_ = is_over_ ? num_since_ : kGrace;
    is_over_ = true;
  }

  // Sees nothing while it rests, as of finalizers that the garbage collector calls.
  void rest(bool rests) { is_resting_ = rests; }

  // Sees nothing of what this thread runs as long as that is this package's own code, whose cost it
  // would double. Returns what was so before.
  static bool set_own(bool is_own);

  static int on_profile(PyObject*, PyFrameObject* frame, int what, PyObject* arg);
  static int on_trace(PyObject*, PyFrameObject* frame, int what, PyObject* arg);
  static int on_audit(const char* event, PyObject* args, void*);

 private:
  struct Code {
    bool is_apart = false;            // nothing is asked of it, whatever it calls
    bool is_timed = false;            // at each line: it may loop without a call
    bool is_asked = false;            // at each call
    bool is_generators = false;       // of a generator or a coroutine, which may go on
    std::unordered_set<int> offsets;  // of the instructions before which it is asked
  };

  // The watch of this thread, unless it rests, or own code runs.
  static CallWatch* watching();
  int ask(const char* method, PyObject* one, PyObject* other = nullptr);
  bool is_late();
  int check_time(PyFrameObject* frame);
  int before_function(PyFrameObject* frame, PyObject* function);
  int enter(PyFrameObject* frame);
  int leave(PyFrameObject* frame);
  int before_generator(PyFrameObject* frame);
  int before_instruction(PyFrameObject* frame);
  int ask_for_instructions(PyObject* frame);
  void note_returned(PyObject* value);
  void look_within(const Code& code);
  const Code* code_of(PyFrameObject* frame);

  py::object policy_;
  std::vector<std::string> audited_;
  double end_ = 0;  // by the time of the thread
  Clock::time_point last_, next_look_;
  bool is_over_ = false, is_inside_ = false, is_resting_ = false, is_own_ = false;
  int num_since_ = kGrace;
  std::unordered_map<const PyMethodDef*, bool> functions_;
  std::unordered_map<PyObject*, Code> codes_;
  std::vector<py::object> held_;                      // the codes, whose addresses stay theirs
  std::unordered_set<PyObject*> generators_;          // that the policy lets go on
  Py_tracefunc profile_ = nullptr, trace_ = nullptr;  // what was there before
  py::object profile_arg_, trace_arg_;
  py::object returned_;  // a lock, by the last function of Python, if nothing was called since
};

thread_local CallWatch* current = nullptr;

// The generator or coroutine whose frame it is; None for a function's.
py::object generator_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  PyObject* generator = PyFrame_GetGenerator(frame);
#else
  PyObject* generator = frame->f_gen;
  Py_XINCREF(generator);
#endif
  return generator == nullptr ? py::none() : py::reinterpret_steal<py::object>(generator);
}

// The interpreter gives a function of its own for both.
void set_profile(Py_tracefunc function, const py::object& arg) {
  PyEval_SetProfile(function, arg.ptr());
}

void set_trace(Py_tracefunc function, const py::object& arg) {
  PyEval_SetTrace(function, arg.ptr());
}

void CallWatch::begin(double seconds, double clock_seconds) {
  if (current != nullptr) throw std::runtime_error("a watch of this thread has begun already");
  static const int added = PySys_AddAuditHook(&CallWatch::on_audit, nullptr);
  if (added != 0) throw py::error_already_set();
  const PyThreadState* state = PyThreadState_Get();
  profile_ = state->c_profilefunc;
  profile_arg_ = py::reinterpret_borrow<py::object>(state->c_profileobj);
  trace_ = state->c_tracefunc;
  trace_arg_ = py::reinterpret_borrow<py::object>(state->c_traceobj);
  const auto now = Clock::now();
  end_ = thread_seconds() + seconds;
  last_ = after(now, clock_seconds);
  next_look_ = after(now, seconds);
  is_over_ = is_resting_ = is_own_ = false;
  num_since_ = kGrace;
  // Python 3.12 sees instructions only if a frame has asked for them before.
  PyObject* frame = reinterpret_cast<PyObject*>(PyEval_GetFrame());
  if (frame != nullptr && ask_for_instructions(frame) != 0) throw py::error_already_set();
  current = this;
  set_profile(&CallWatch::on_profile, py::none());
  set_trace(&CallWatch::on_trace, py::none());
  if (frame != nullptr && PyObject_SetAttrString(frame, "f_trace_opcodes", Py_False) != 0) {
    PyErr_Clear();
  }
}

// Has the interpreter call `on_trace` before each instruction of a frame. -1 where it raises.
int CallWatch::ask_for_instructions(PyObject* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  // Python 3.13 asks for a trace function of the frame, too, which is not called.
  const auto ignored = policy_.attr("ignores");
  const auto traced = py::reinterpret_steal<py::object>(PyObject_GetAttrString(frame, "f_trace"));
  if (traced && traced.is_none() && PyObject_SetAttrString(frame, "f_trace", ignored.ptr()) != 0) {
    return -1;
  }
#endif
  return PyObject_SetAttrString(frame, "f_trace_opcodes", Py_True);
}

void CallWatch::end() {
  if (current != this) return;
  current = nullptr;
  returned_ = py::object();
  set_trace(trace_, trace_arg_);
  set_profile(profile_, profile_arg_);
}

// Asks the policy, whose own code is not watched. -1 where it raises.
int CallWatch::ask(const char* method, PyObject* one, PyObject* other) {
  is_inside_ = true;
  const py::str name(method);
  PyObject* answer = PyObject_CallMethodObjArgs(policy_.ptr(), name.ptr(), one, other, nullptr);
  is_inside_ = false;
  if (answer == nullptr) return -1;
  Py_DECREF(answer);
  return 0;
}

// Asks for the time of the thread, which is slow, no earlier than it may be over: it never runs
// faster than the clock.
bool CallWatch::is_late() {
  const auto now = Clock::now();
  if (now < next_look_) return false;
  const double left = end_ - thread_seconds();
  if (left <= 0 || now > last_) return true;
  next_look_ = after(now, left);
  return false;
}

int CallWatch::check_time(PyFrameObject* frame) {
  if (!is_over_) is_over_ = is_late();
  if (!is_over_ || ++num_since_ < kGrace) return 0;
  if (ask("on_over", reinterpret_cast<PyObject*>(frame)) == 0) return 0;
  num_since_ = 0;
  return -1;
}

int CallWatch::before_function(PyFrameObject* frame, PyObject* function) {
  if (!PyCFunction_Check(function)) return 0;
  const PyMethodDef* method = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  auto found = functions_.find(method);
  if (found == functions_.end()) {
    is_inside_ = true;
    PyObject* answer = PyObject_CallMethod(policy_.ptr(), "asks_about", "O", function);
    is_inside_ = false;
    if (answer == nullptr) return -1;
    found = functions_.emplace(method, answer == Py_True).first;
    Py_DECREF(answer);
  }
  if (!found->second) return 0;
  const Code* code = code_of(frame);
  if (code == nullptr) return -1;
  if (code->is_apart) return 0;
  return ask("on_function", reinterpret_cast<PyObject*>(frame), function);
}

const CallWatch::Code* CallWatch::code_of(PyFrameObject* frame) {
  const auto code =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const auto found = codes_.find(code.ptr());
  if (found != codes_.end()) return &found->second;
  is_inside_ = true;
  PyObject* answer = PyObject_CallMethod(policy_.ptr(), "asks_at", "O", code.ptr());
  is_inside_ = false;
  if (answer == nullptr) return nullptr;
  const auto places = py::reinterpret_steal<py::object>(answer);
  Code made;
  made.is_apart = places.is_none();
  if (!made.is_apart) {
    const auto [is_timed, is_asked, offsets] =
        places.cast<std::tuple<bool, bool, std::vector<int>>>();
    made.is_timed = is_timed;
    made.is_asked = is_asked;
    made.offsets.insert(offsets.begin(), offsets.end());
    constexpr int kGenerators = CO_GENERATOR | CO_COROUTINE;
    made.is_generators = (reinterpret_cast<PyCodeObject*>(code.ptr())->co_flags & kGenerators) != 0;
  }
  held_.push_back(code);
  return &codes_.emplace(code.ptr(), std::move(made)).first->second;
}

// Has the interpreter call `on_trace` while code runs that is looked at within, and only then.
void CallWatch::look_within(const Code& code) {
#if PY_VERSION_HEX < 0x030C0000
  const bool is_looked_at = code.is_timed || !code.offsets.empty();
  PyThreadState_Get()->c_tracefunc = is_looked_at ? &CallWatch::on_trace : nullptr;
#endif
}

int CallWatch::enter(PyFrameObject* frame) {
  if (check_time(frame) != 0) return -1;
  const Code* code = code_of(frame);
  if (code == nullptr) return -1;
  look_within(*code);
  auto* own = reinterpret_cast<PyObject*>(frame);
  if (!code->offsets.empty() && ask_for_instructions(own) != 0) return -1;
  if (code->is_generators && before_generator(frame) != 0) return -1;
  return code->is_asked ? ask("on_code", own) : 0;
}

int CallWatch::leave(PyFrameObject* frame) {
  const auto caller =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(frame)));
  if (!caller) return 0;
  const Code* code = code_of(reinterpret_cast<PyFrameObject*>(caller.ptr()));
  if (code == nullptr) return -1;
  look_within(*code);
  return 0;
}

// Asks once for each. What is made later at the address of one that may go on may go on, too: it is
// the run's own.
int CallWatch::before_generator(PyFrameObject* frame) {
  const py::object generator = generator_of(frame);
  if (generator.is_none() || generators_.count(generator.ptr()) != 0) return 0;
  is_inside_ = true;
  PyObject* answer = PyObject_CallMethod(policy_.ptr(), "may_go_on", "OO", frame, generator.ptr());
  is_inside_ = false;
  if (answer == nullptr) return -1;
  if (answer == Py_True) generators_.insert(generator.ptr());
  Py_DECREF(answer);
  return 0;
}

int CallWatch::before_instruction(PyFrameObject* frame) {
  const Code* code = code_of(frame);
  if (code == nullptr) return -1;
  auto* own = reinterpret_cast<PyObject*>(frame);
  if (code->offsets.empty()) return 0;
  const auto place = py::reinterpret_steal<py::object>(PyObject_GetAttrString(own, "f_lasti"));
  if (!place) return -1;
  if (code->offsets.count(place.cast<int>()) == 0) return 0;
  const py::object returned = returned_ ? returned_ : py::none();
  return ask("on_instruction", own, returned.ptr());
}

// A lock alone: autograd copies a gradient to which somebody else holds a reference.
void CallWatch::note_returned(PyObject* value) {
  const bool is_lock =
      value != nullptr && std::string_view(Py_TYPE(value)->tp_name).substr(0, 8) == "_thread.";
  returned_ = is_lock ? py::reinterpret_borrow<py::object>(value) : py::object();
}

CallWatch* CallWatch::watching() {
  CallWatch* own = current;
  const bool sees = own != nullptr && !own->is_inside_ && !own->is_resting_ && !own->is_own_;
  return sees ? own : nullptr;
}

bool CallWatch::set_own(bool is_own) {
  CallWatch* own = current;
  if (own == nullptr || own->is_own_ == is_own) return is_own;
  own->is_own_ = is_own;
#if PY_VERSION_HEX < 0x030C0000
  // What begins and ends it is own code, within which no instruction is looked at.
  PyThreadState* state = PyThreadState_Get();
  state->c_profilefunc = is_own ? nullptr : &CallWatch::on_profile;
  state->c_tracefunc = nullptr;
  state->cframe->use_tracing = is_own ? 0 : 255;
#endif
  return !is_own;
}

// While it is entered this package's own code runs, or again that of the program.
class OwnCode {
 public:
  explicit OwnCode(bool is_own) : is_own_(is_own) {}
  void enter() { before_ = CallWatch::set_own(is_own_); }
  void exit(const py::args&) { CallWatch::set_own(before_); }

 private:
  bool is_own_, before_ = false;
};

int CallWatch::on_profile(PyObject*, PyFrameObject* frame, int what, PyObject* arg) {
  CallWatch* own = watching();
  if (own == nullptr) return 0;
  switch (what) {
    case PyTrace_C_CALL:
      own->returned_ = py::object();
      return own->check_time(frame) != 0 ? -1 : own->before_function(frame, arg);
    case PyTrace_CALL: {
      if (own->enter(frame) == 0) return 0;
      const py::error_scope raised;  // the interpreter tells of no return then
      own->leave(frame);
      return -1;
    }
    case PyTrace_RETURN: own->note_returned(arg); return own->leave(frame);
    default: return 0;
  }
}

int CallWatch::on_trace(PyObject*, PyFrameObject* frame, int what, PyObject*) {
  CallWatch* own = watching();
  if (own == nullptr) return 0;
  switch (what) {
    case PyTrace_LINE: return own->check_time(frame);
    case PyTrace_OPCODE: return own->before_instruction(frame);
    default: return 0;
  }
}

int CallWatch::on_audit(const char* event, PyObject* args, void*) {
  CallWatch* own = watching();
  if (own == nullptr) return 0;
  const std::string_view name(event);
  for (const std::string& each : own->audited_) {
    if (name.substr(0, each.size()) == each) {
      const py::str text(event);
      return own->ask("on_audit", text.ptr(), args);
    }
  }
  return 0;
}

// Sets Python's handler of a signal alone. What the system calls stays as it is, with its flags: a
// handler of C that stands before Python's, and what `signal.siginterrupt()` has said.
void set_signal_handler(int number, const py::object& handler) {
#ifdef _WIN32
  py::module_::import("signal").attr("signal")(number, handler);
#else
  struct sigaction before;
  const bool is_known = sigaction(number, nullptr, &before) == 0;
  py::module_::import("signal").attr("signal")(number, handler);
  if (is_known) sigaction(number, &before, nullptr);
#endif
}

}  // namespace

void bind_call_watch(py::module_& m) {
  py::class_<CallWatch>(m, "CallWatch")
      .def(py::init<py::object, std::vector<std::string>>(), py::arg("policy"), py::arg("audited"))
      .def("begin", &CallWatch::begin, py::arg("seconds"), py::arg("clock_seconds"))
      .def("end", &CallWatch::end)
      .def("refuse_all", &CallWatch::refuse_all)
      .def("rest", &CallWatch::rest, py::arg("rests"));
  py::class_<OwnCode>(m, "OwnCode")
      .def(py::init<bool>(), py::arg("is_own"))
      .def("__enter__", &OwnCode::enter)
      .def("__exit__", &OwnCode::exit);
  m.def(
      "generator_of",
      [](const py::object& frame) {
        return generator_of(reinterpret_cast<PyFrameObject*>(frame.ptr()));
      },
      py::arg("frame"));
  m.def("set_signal_handler", &set_signal_handler, py::arg("number"), py::arg("handler"));
}

}  // namespace overflow_fast
