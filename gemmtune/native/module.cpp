// The look-up of a warm call in C++: ``look_up`` reads the key from the arguments, finds the record, and launches.
#include "layer.h"
#include "parse.h"

#include <torch/csrc/Exceptions.h>

#include <limits>

namespace gemmtune {
namespace {

Table table;
uint64_t generation = 0;  // of valid plans: records of an older generation are rejected
constexpr size_t kMostRecords = 65536;

// Translate a C++ exception to the one that torch raises in Python. Unlike torch's macro this is free without an exception.
template <class F>
PyObject* guarded(F function) {
  try {
    return function();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

class Held {
 public:
  explicit Held(Record* record) : record_(record) { ++record_->users; }
  ~Held() { Record::leave(record_); }
  Held(Held const&) = delete;

 private:
  Record* record_;
};

class WithoutGil {
 public:
  explicit WithoutGil(bool release) : state_(release ? PyEval_SaveThread() : nullptr) {}
  // For torch's operations, which on the CPU copy the tensors they read. The first copy of a tensor that Python owns takes the GIL. Copies
  // made before the GIL is released spare them the wait.
  WithoutGil(bool release, Call const& call) : kept_(release && call.read[0]->is_cpu() ? call.count : 0) {
    for (size_t i = 0; i < kept_.size(); ++i) kept_[i] = *call.read[i];
    if (release) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(WithoutGil const&) = delete;

 private:
  std::vector<at::Tensor> kept_;
  PyThreadState* state_ = nullptr;
};

// Return true if out lies wholly before or after each tensor that is read.
bool apart(Call const& call) {
  const auto span = [](at::Tensor const& x) { return span_bytes(x.sizes(), x.strides(), x.scalar_type()); };
  const auto first = reinterpret_cast<uintptr_t>(call.out_data), end = first + span(*call.out);
  for (int i = 0; i < call.count; ++i) {
    const auto address = reinterpret_cast<uintptr_t>(call.data[i]);
    if (address < end && first < address + span(*call.read[i])) return false;
  }
  return true;
}

// Run the call in Python. ``missing`` is true if no such call was kept, and false if the call needs a closer look.
PyObject* elsewhere(PyObject* missing, Arguments const& given) {
  PyObject* arguments[Arguments::kMost + 1] = {missing};
  std::copy_n(given.all, given.count, arguments + 1);
  return PyObject_Vectorcall(around.in_python, arguments, given.count + 1, nullptr);
}

// Allocate the result of a call by its record.
at::Tensor made(Record const& record, Call const& call) {
  const c10::Device device = call.read[0]->device();
  if (!record.several()) return allocate(record.result, device);
  Result result = record.result;
  const int at = result.dims - 2;
  if (at == 1 && result.stride[0] == result.size[1] * result.stride[1]) result.stride[0] = call.key.rows * result.stride[1];
  result.size[at] = call.key.rows;
  return allocate(result, device);
}

// Run the plan's own functions: for plans without a launch, and for calls that a launch refused, whose errors they report. A record of
// several Ms has no such functions.
PyObject* by_python(Record const& record, Call const& call, Arguments const& given, PyObject* packed) {
  if (record.several()) return elsewhere(Py_False, given);
  PyObject* tensors = PyTuple_New(call.count);
  if (tensors == nullptr) return nullptr;
  for (int i = 0; i < call.count; ++i) {
    PyTuple_SET_ITEM(tensors, i, Py_NewRef(i == 1 && packed != nullptr ? packed : call.objects[i]));
  }
  PyObject* arguments[] = {given.out, tensors, given.scalars};
  PyObject* result = call.out != nullptr ? PyObject_Vectorcall(record.into, arguments, 3, nullptr)
                                         : PyObject_Vectorcall(record.fresh, arguments + 1, 2, nullptr);
  Py_DECREF(tensors);
  return result;
}

PyObject* by_torch(Record const& record, Call const& call, Arguments const& given) {
  at::Tensor result = call.out != nullptr ? *call.out : made(record, call);
  {
    WithoutGil free(record.lengthy(call.key.rows), call);
    launch(std::get<TorchOperation>(record.launch), result, call.read, call.scalars);
  }
  if (call.out == nullptr) return THPVariable_Wrap(std::move(result));
  result.unsafeGetTensorImpl()->bump_version();
  return Py_NewRef(given.out);
}

// Return 0 if the kernel was launched.
int launched(Record& record, Given& given, bool lengthy) {
  if (auto* driver = std::get_if<DriverLaunch>(&record.launch)) {
    Filled filled;
    if (!fill(*driver, given, filled)) return -1;
    WithoutGil free(lengthy);
    return launch(*driver, filled, given.stream);
  }
  auto* library = std::get_if<LibraryProduct>(&record.launch);
  if (library != nullptr && given.rows != 0 && !allowed(*library, given.rows)) return -1;
  WithoutGil free(lengthy);
  if (auto const* host = std::get_if<HostFunction>(&record.launch)) return launch(*host, given);
  if (auto const* device = std::get_if<DeviceFunction>(&record.launch)) return launch(*device, given);
  return launch(*library, given);
}

enum class Outcome { kDone, kPython, kFailed };  // kPython: Python must run the call; kFailed: an error is set

// Launch into ``out``, which is allocated if it is undefined.
Outcome launch_kept(Record& record, Call const& call, at::Tensor& out) {
  Given given;
  given.rows = record.several() ? call.key.rows : 0;
  given.stream = stream_of(call.read[0]->device());
  if (record.memory.needed()) {
    const auto asked = record.memory.of(given.stream, given.memory);
    if (asked != Memory::Asking::kFound) return asked == Memory::Asking::kPython ? Outcome::kPython : Outcome::kFailed;
  }
  if (!out.defined()) out = made(record, call);
  given.out = out.mutable_data_ptr();
  given.count = call.count;
  given.scalars = call.scalars;
  std::copy_n(call.data, call.count, given.read);
  return launched(record, given, record.lengthy(call.key.rows)) == 0 ? Outcome::kDone : Outcome::kPython;
}

PyObject* by_launch(Record& record, Call const& call, Arguments const& given, PyObject* packed) {
  at::Tensor out = call.out != nullptr ? *call.out : at::Tensor();
  switch (launch_kept(record, call, out)) {
    case Outcome::kFailed: return nullptr;
    case Outcome::kPython: return by_python(record, call, given, packed);
    default: break;
  }
  if (call.out == nullptr) return THPVariable_Wrap(std::move(out));
  out.unsafeGetTensorImpl()->bump_version();
  return Py_NewRef(given.out);
}

PyObject* run(Record* record, Call& call, Arguments const& given) {
  Held held(record);
  PyObject *packed = nullptr, *operand = call.objects[1];
  if (reinterpret_cast<PyObject*>(Py_TYPE(operand)) == around.packed_type) {
    packed = record->choice == nullptr ? PyObject_GetAttr(operand, around.tensor_name)
                                       : PyObject_CallMethodOneArg(operand, around.for_choice_name, record->choice);
    if (packed == nullptr) return nullptr;
    call.read[1] = &THPVariable_Unpack(packed);
    call.data[1] = call.read[1]->const_data_ptr();
  }
  PyObject* result = std::holds_alternative<std::monostate>(record->launch)   ? by_python(*record, call, given, packed)
                     : std::holds_alternative<TorchOperation>(record->launch) ? by_torch(*record, call, given)
                                                                              : by_launch(*record, call, given, packed);
  Py_XDECREF(packed);
  return result;
}

// Return the result of a call, by its record or by Python.
PyObject* look_up(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments given;
  if (!given.read(args, count)) return nullptr;
  Call call;
  return guarded([&]() -> PyObject* {
    const Reading reading = read_call(given, call, false);
    if (reading == Reading::kUnusual) return elsewhere(Py_False, given);
    Record* record = reading == Reading::kRead ? table.find(call.key) : nullptr;
    if (record == nullptr) return elsewhere(Py_True, given);
    if (call.out != nullptr && !apart(call)) return elsewhere(Py_False, given);
    return run(record, call, given);
  });
}

// Return the kept entry that ``look_up`` would run. False: no such call was kept. None: Python must look closer.
PyObject* found(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
  Arguments given;
  if (!given.read(args, count)) return nullptr;
  Call call;
  const Reading reading = read_call(given, call, false);
  if (reading == Reading::kUnusual) Py_RETURN_NONE;
  Record* record = reading == Reading::kRead ? table.find(call.key) : nullptr;
  if (record == nullptr) Py_RETURN_FALSE;
  return Py_NewRef(record->entry);
  });
}

// keep(generation, record, *arguments of the call): return True if calls like this one are found from now on.
PyObject* keep(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
  Arguments given;
  if (!given.read(args + 2, count - 2)) return nullptr;
  const uint64_t number = PyLong_AsUnsignedLongLong(args[0]);
  if (PyErr_Occurred()) return nullptr;
  auto record = std::make_unique<Record>();
  if (!parse(args[1], *record)) return nullptr;
  Call call;
  if (read_call(given, call, true) != Reading::kRead) Py_RETURN_FALSE;
  if (record->tensors != call.count) Py_RETURN_FALSE;
  record->key = call.key;
  if (number != generation) Py_RETURN_FALSE;
  if (table.count() >= kMostRecords) table.clear();
  table.insert(std::move(record));
  Py_RETURN_TRUE;
  });
}

// Read the arguments of a call, or the three of a layer's forward, in order to keep a record. ``kUnusual`` with a Python error set: they
// are neither.
Reading read_any(PyObject* const* args, Py_ssize_t count, Call& call) {
  if (count == 3) return read_layer(args[0], args[1], args[2], call);
  Arguments given;
  return given.read(args, count) ? read_call(given, call, true) : Reading::kUnusual;
}

// rows_of(*arguments): return a bit for each tensor with M rows. None if M is not separate, if Python must look closer, or if calls of any
// M are kept already. The arguments are those of a call, or (input, weight, bias) of a layer's forward.
PyObject* rows_of(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    Call call;
    if (read_any(args, count, call) != Reading::kRead || call.key.rows == kEveryRows || table.knows_rows_of(call.key)) {
      return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
    }
    return PyLong_FromUnsignedLong(call.following);
  });
}

// Replace the records of calls like this one with any M. ``runs`` are records, each of an interval of M, in order. True if one of them
// serves this call.
PyObject* keep_family(PyObject* number, PyObject* runs, Call const& call) {
  const uint64_t made_in = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) return nullptr;
  if (!PyTuple_Check(runs)) return PyErr_Format(PyExc_TypeError, "expected a tuple of records");
  auto family = std::make_unique<Record>();
  int64_t behind = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(runs); ++i) {
    auto run = std::make_unique<Record>();
    if (!parse(PyTuple_GET_ITEM(runs, i), *run)) return nullptr;
    if (run->lo <= behind || run->hi < run->lo) return PyErr_Format(PyExc_ValueError, "expected intervals of M in their order");
    if (run->tensors != call.count || std::holds_alternative<std::monostate>(run->launch)) Py_RETURN_FALSE;
    behind = run->hi;
    family->add(std::move(run));
  }
  const bool served = family->at(call.key.rows) != nullptr;
  family->key = call.key;
  family->key.rows = kEveryRows;
  if (made_in != generation) Py_RETURN_FALSE;
  if (table.count() >= kMostRecords) table.clear();
  table.insert(std::move(family));
  return PyBool_FromLong(served);
}

// keep_rows(generation, runs, *arguments of ``rows_of``): return True if a run serves this call from now on. Calls that differ only in M
// are served too.
PyObject* keep_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    Call call;
    if (read_any(args + 2, count - 2, call) != Reading::kRead || call.key.rows == kEveryRows) {
      return PyErr_Occurred() ? nullptr : Py_NewRef(Py_False);
    }
    return keep_family(args[0], args[1], call);
  });
}

// rehearse(kind, launch, M): return the arguments of the launch for M rows as bytes, without addresses. See image_of in following.py.
PyObject* rehearse(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    int kind;
    PyObject* launch;
    long long rows;
    if (!PyArg_ParseTuple(args, "iO!L", &kind, &PyTuple_Type, &launch, &rows)) return nullptr;
    Record record;
    if (!parse_launch(kind, launch, record)) return nullptr;
    return image(record.launch, rows);
  });
}

// layer(input, weight, bias): return the result. False: no record for such operands. None: Python must run the layer.
PyObject* layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) return PyErr_Format(PyExc_TypeError, "expected (input, weight, bias), got %zd arguments", count);
  Call call;
  return guarded([&]() -> PyObject* {
    if (read_layer(args[0], args[1], args[2], call) != Reading::kRead) Py_RETURN_NONE;
    Record* record = table.find(call.key);
    if (record == nullptr) Py_RETURN_FALSE;
    const c10::Device device = call.read[0]->device();
    if (std::holds_alternative<std::monostate>(record->launch) || (record->capture_info != 0 && captured(record->capture_info, device))) Py_RETURN_NONE;
    Held held(record);
    at::Tensor out;
    if (std::holds_alternative<TorchOperation>(record->launch)) {
      const auto bias = call.count > 2 ? std::optional(*call.read[2]) : std::nullopt;  // a copy, made while the GIL is held
      WithoutGil free(record->lengthy(call.key.rows));
      out = layer_by_torch(call, bias);
    } else {
      out = allocate(result_of_layer(*record, call), device);
      const Outcome outcome = launch_kept(*record, call, out);
      if (outcome == Outcome::kFailed) return nullptr;
      if (outcome == Outcome::kPython) Py_RETURN_NONE;
    }
    return THPVariable_Wrap(std::move(out));
  });
}

// keep_layer(generation, record or None for torch's operation, capture_info, input, weight, bias): return True if it is kept.
PyObject* keep_layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 6) return PyErr_Format(PyExc_TypeError, "expected (generation, record, capture_info, input, weight, bias)");
    const uint64_t number = PyLong_AsUnsignedLongLong(args[0]), capture_info = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred()) return nullptr;
    Call call;
    if (read_layer(args[3], args[4], args[5], call) != Reading::kRead || number != generation) Py_RETURN_FALSE;
    auto record = std::make_unique<Record>();
    if (args[1] != Py_None && !parse(args[1], *record)) return nullptr;
    if (args[1] == Py_None) {
      record->launch.emplace<TorchOperation>();
      record->lengthy_from = call.read[0]->is_cuda() ? 0 : std::numeric_limits<int64_t>::max();
    }
    record->key = call.key;
    record->capture_info = capture_info;
    if (table.count() >= kMostRecords) table.clear();
    table.insert(std::move(record));
    Py_RETURN_TRUE;
  });
}

// forget(generation, token): drop all records. Accept plans of that generation; the token is that of the settings without a patch.
PyObject* forget(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
  unsigned long long number, token;
  if (!PyArg_ParseTuple(args, "KK", &number, &token)) return nullptr;
  generation = number;
  around.token = token + 1;
  table.clear();
  if (table.count() == 0) forget_numbers();
  Py_RETURN_NONE;
  });
}

PyObject* count(PyObject*, PyObject*) { return PyLong_FromSize_t(table.count()); }

PyObject* surround(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
  if (!PyArg_ParseTuple(args, "OOOOO", &around.settings, &around.in_python, &around.meaning_of, &around.packed_type, &around.profiler)) {
    return nullptr;
  }
  for (PyObject* kept : {around.settings, around.in_python, around.meaning_of, around.packed_type, around.profiler}) Py_INCREF(kept);
  Py_RETURN_NONE;
  });
}

template <class F>
PyCFunction method(F function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"look_up", method(look_up), METH_FASTCALL, "Return the result of a call, by a kept record or by Python."},
    {"found", method(found), METH_FASTCALL, "Return the kept entry that look_up would run. False: none. None: Python looks closer."},
    {"keep", method(keep), METH_FASTCALL, "keep(generation, record, *arguments): return True if calls like this one are found from now on."},
    {"rows_of", method(rows_of), METH_FASTCALL, "rows_of(*arguments): return a bit for each tensor with M rows, or None."},
    {"keep_rows", method(keep_rows), METH_FASTCALL, "keep_rows(generation, runs, *arguments): return True if calls of any M are found from now on."},
    {"rehearse", rehearse, METH_VARARGS, "rehearse(kind, launch, M): return the arguments of the launch for M rows."},
    {"layer", method(layer), METH_FASTCALL, "layer(input, weight, bias): return the result. False: no record. None: Python must run it."},
    {"keep_layer", method(keep_layer), METH_FASTCALL, "keep_layer(generation, record or None, capture_info, input, weight, bias)"},
    {"forget", forget, METH_VARARGS, "forget(generation, token): drop every record."},
    {"count", count, METH_NOARGS, "Return the number of records."},
    {"surround", surround, METH_VARARGS, "surround(settings variable, in_python, meaning_of, PackedOperand, dict of the profiler's module)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "gemmtune_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace gemmtune

PyMODINIT_FUNC PyInit_gemmtune_native() {
  using gemmtune::around;
  static const gemmtune::Ordinary usual;
  gemmtune::ordinary = &usual;
  around.numbers = PyDict_New();
  around.profiling = PyUnicode_InternFromString("_is_profiler_enabled");
  around.token_name = PyUnicode_InternFromString("token");
  around.tensor_name = PyUnicode_InternFromString("tensor");
  around.for_choice_name = PyUnicode_InternFromString("for_choice");
  if (around.numbers == nullptr || around.for_choice_name == nullptr) return nullptr;
  return PyModule_Create(&gemmtune::definition);
}
