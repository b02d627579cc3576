// The key of a call: every fact that a plan depends on, read from the arguments like key_of in dispatch/keys.py.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <torch/csrc/python_headers.h>

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>
#include <cstring>
#include <numeric>

namespace gemmtune {

constexpr int kMostTensors = 12;  // tensors that a call reads
constexpr int kMostWords = 96;

constexpr uint64_t kRows = ~uint64_t{0};  // replaces a size that is M, and a stride over M rows
constexpr int64_t kAlignedBytes = 16;     // ALIGNED_BYTES of problem/layout.py
constexpr int64_t kEveryRows = 0;         // replaces M in a key that many Ms share

// If the rows of the first operand are separate, the words have kRows instead of M, and ``rows`` is M.
struct Key {
  int count = 0;
  int64_t rows = kEveryRows;
  uint64_t words[kMostWords];

  void add(uint64_t word) { words[count++] = word; }
  bool is(Key const& other, int64_t other_rows) const {
    return count == other.count && rows == other_rows && std::memcmp(words, other.words, count * sizeof(uint64_t)) == 0;
  }
  // Hash of the words alone: a sum of products of pairs, so that no multiplication waits for another. Each position has its own factors.
  uint64_t hash() const {
    uint64_t first = 0x9e3779b97f4a7c15ull, second = 0xc2b2ae3d27d4eb4full;
    __uint128_t sum = static_cast<uint64_t>(count);
    int i = 0;
    for (; i + 1 < count; i += 2, first += 0xa0761d6478bd642full, second += 0xe7037ed1a0b428dbull) {
      sum += static_cast<__uint128_t>(words[i] ^ first) * (words[i + 1] ^ second);
    }
    if (i < count) sum += static_cast<__uint128_t>(words[i] ^ first) * second;
    return mixed(static_cast<uint64_t>(sum), static_cast<uint64_t>(sum >> 64));
  }
  static uint64_t mixed(uint64_t h, uint64_t word) {
    const __uint128_t product = static_cast<__uint128_t>(word ^ h) * 0xd6e8feb86659fd93ull;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64) ^ (h << 1);
  }
};

// The arguments of the look-up, the operands last: packing them in a tuple would cost as much as finding the record.
struct Arguments {
  static constexpr Py_ssize_t kBefore = 8, kMost = kBefore + kMostTensors;
  PyObject* const* all = nullptr;
  Py_ssize_t count = 0;
  PyObject *name = nullptr, *out = nullptr, *epilogue = nullptr, *epilogue_args = nullptr, *scalars = nullptr, *options = nullptr,
           *brought = nullptr, *out_dtype = nullptr;
  PyObject* const* operands = nullptr;
  Py_ssize_t own = 0;  // number of operands

  // False with a Python error set.
  bool read(PyObject* const* args, Py_ssize_t given) {
    if (given < kBefore || given > kMost || !PyTuple_CheckExact(args[4]) || !PyTuple_CheckExact(args[5])) {
      PyErr_SetString(PyExc_TypeError,
                      "expected (name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype, *operands)");
      return false;
    }
    all = args;
    count = given;
    name = args[0];
    out = args[1];
    epilogue = args[2];
    epilogue_args = args[3];
    scalars = args[4];
    options = args[5];
    brought = args[6];
    out_dtype = args[7];
    operands = args + kBefore;
    own = given - kBefore;
    return true;
  }
};

// A call whose key was read. Pointers are borrowed from the arguments.
struct Call {
  Key key;
  at::Tensor const* read[kMostTensors];
  void const* data[kMostTensors];  // start of each tensor's data
  PyObject* objects[kMostTensors];  // the Python objects; a prepacked b as the caller passed it
  int count = 0;
  int at[kMostTensors];     // start of each tensor in the key
  uint32_t following = 0;   // a bit for each tensor that has M rows
  at::Tensor const* out = nullptr;
  void const* out_data = nullptr;
  double scalars[2] = {1, 0};
};

enum class Reading { kRead, kUnknown, kUnusual };  // kUnknown: the key has an object that no kept call has

// Python objects that the look-up uses. They are set once, when the module is installed.
struct Surroundings {
  PyObject* settings = nullptr;          // the context variable of patched settings
  PyObject* in_python = nullptr;         // in_python(missing, *arguments): runs every other call
  PyObject* meaning_of = nullptr;        // returns the meaning of an epilogue function
  PyObject* packed_type = nullptr;       // PackedOperand
  PyObject* profiler = nullptr;          // the dict of torch.autograd.profiler
  PyObject* profiling = nullptr;         // the name of the flag in it
  PyObject* token_name = nullptr;        // "token"
  PyObject* tensor_name = nullptr;       // "tensor"
  PyObject* for_choice_name = nullptr;   // "for_choice"
  PyObject* numbers = nullptr;           // dict: an object in a key -> its number
  uint64_t next_number = 1;
  static constexpr size_t kRecent = 64;
  std::pair<PyObject*, uint64_t> recent[kRecent] = {};  // recently used entries of the dict, by address
  uint64_t token = 0;                    // token of the settings outside of any patch
  PyObject* last_settings = nullptr;     // patched settings whose token was read last
  uint64_t last_token = 0;
};
inline Surroundings around;

// Bits of key sets and of the thread's dispatch state that a plain call may have.
struct Ordinary {
  uint64_t tensor_keys, inference_included, inference_excluded;
  Ordinary() {
    using c10::DispatchKey;
    tensor_keys = c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU,
                                       DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA}).raw_repr();
    c10::InferenceMode mode;
    inference_included = c10::impl::raw_local_dispatch_key_set.included_;
    inference_excluded = c10::impl::raw_local_dispatch_key_set.excluded_;
  }
};
inline Ordinary const* ordinary = nullptr;

// Return true if torch intercepts nothing in this thread: no autocast, mode, torch.func transform, trace or profiler.
inline bool plain_thread() {
  auto const& state = c10::impl::raw_local_dispatch_key_set;
  const bool plain = (state.included_ | state.excluded_) == 0 ||
                     (state.included_ == ordinary->inference_included && state.excluded_ == ordinary->inference_excluded);
  return plain && !at::impl::torch_function_mode_enabled() && PyDict_GetItem(around.profiler, around.profiling) == Py_False;
}

// Drop the numbers of all objects.
inline void forget_numbers() {
  for (auto& one : around.recent) one = {};
  PyDict_Clear(around.numbers);
}

// Return the number of an object in a key. 0 without an error means that it has none. ``make`` assigns one.
inline uint64_t number_of(PyObject* object, bool make) {
  auto& recent = around.recent[(reinterpret_cast<uintptr_t>(object) >> 4) % Surroundings::kRecent];
  if (recent.first == object) return recent.second;
  PyObject* known = PyDict_GetItemWithError(around.numbers, object);
  if (known != nullptr) return PyLong_AsUnsignedLongLong(known);
  if (PyErr_Occurred()) {
    PyErr_Clear();  // it is unhashable, which the Python path reports
    return 0;
  }
  if (!make) return 0;
  const uint64_t number = around.next_number++;
  PyObject* value = PyLong_FromUnsignedLongLong(number);
  const bool kept = value != nullptr && PyDict_SetItem(around.numbers, object, value) == 0;
  Py_XDECREF(value);
  if (!kept) PyErr_Clear();
  if (kept) recent = {object, number};  // the dict keeps the object alive, so that no other one gets its address
  return kept ? number : 0;
}

// Return the token of the settings in force; 0 if it cannot be read.
inline uint64_t settings_token() {
  PyObject* settings = nullptr;
  if (PyContextVar_Get(around.settings, nullptr, &settings) != 0) {
    PyErr_Clear();
    return 0;
  }
  if (settings == nullptr || settings == Py_None) {
    Py_XDECREF(settings);
    return around.token;
  }
  if (settings == around.last_settings) {
    Py_DECREF(settings);
    return around.last_token;
  }
  PyObject* token = PyObject_GetAttr(settings, around.token_name);
  const uint64_t value = token == nullptr ? 0 : PyLong_AsUnsignedLongLong(token) + 1;
  Py_XDECREF(token);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    Py_DECREF(settings);
    return 0;
  }
  PyObject* before = around.last_settings;
  around.last_settings = settings;  // kept alive, so that no other object gets its address
  around.last_token = value;
  Py_XDECREF(before);
  return value;
}

// Return the start of a dense tensor's data; null without elements or memory. const_data_ptr returns the same, but queries the tensor's
// kind by virtual functions and out of line.
inline void const* data_of(c10::TensorImpl const* impl) {
  c10::Storage const& storage = impl->unsafe_storage();
  if (!storage || storage.data() == nullptr || impl->numel() == 0) return nullptr;
  return static_cast<char const*>(storage.data()) + impl->storage_offset() * static_cast<int64_t>(impl->itemsize());
}

// Add a tensor and its start to the key. Null: the call needs a closer look in Python.
inline at::Tensor const* add_tensor(PyObject* object, Key& key, void const*& data) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  at::Tensor const& tensor = THPVariable_Unpack(object);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  // Conjugated, negated, sparse, quantized, nested, meta, functorch and functional tensors have further dispatch keys.
  if (impl->key_set().raw_repr() & ~ordinary->tensor_keys) return nullptr;
  if (auto* meta = static_cast<torch::autograd::AutogradMeta*>(impl->autograd_meta())) {
    if (meta->fw_grad_ != nullptr) return nullptr;
    if (c10::GradMode::is_enabled() && tensor.requires_grad()) return nullptr;
  }
  const auto sizes = impl->sizes(), strides = impl->strides();
  const int dims = static_cast<int>(sizes.size());
  if (key.count + 1 + 2 * dims > kMostWords || dims > 8) return nullptr;
  data = data_of(impl);
  if (data == nullptr) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(data);
  key.add(static_cast<uint64_t>(dims) | static_cast<uint64_t>(c10::typeMetaToScalarType(impl->dtype())) << 8 | (address & 15) << 16);
  for (int i = 0; i < dims; ++i) key.add(sizes[i]);
  for (int i = 0; i < dims; ++i) key.add(sizes[i] == 1 ? 0 : strides[i]);  // of one element it is arbitrary
  return &tensor;
}

// Return torch's flags that a product of this dtype on a GPU depends on; -1 if another device is current.
inline int64_t device_flags(at::Tensor const& a) {
  auto& context = at::globalContext();
  if (a.get_device() != c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index()) return -1;
  switch (a.scalar_type()) {
    case at::kBFloat16: return static_cast<int64_t>(context.allowBF16ReductionCuBLAS());
    case at::kHalf: return static_cast<int64_t>(context.allowFP16ReductionCuBLAS());
    case at::kFloat: return static_cast<int64_t>(context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL));
    default: return 0;
  }
}

// Return what a plan depends on in addition to its tensors: torch's flags and the device.
inline uint64_t state_word(at::Tensor const& a, int64_t flags) {
  return static_cast<uint64_t>(flags) | static_cast<uint64_t>(at::globalContext().deterministicAlgorithms()) << 8 |
         static_cast<uint64_t>(a.get_device() + 1) << 32 | static_cast<uint64_t>(a.device().type()) << 48;
}

constexpr double kMostScalar = 0x1p62;  // as in dispatch/scalars.py: every dtype takes alpha and beta up to this size

// Read the classes of alpha and beta as in Problem: zero, one, general. False if they are not plain numbers that every dtype takes.
inline bool read_scalars(PyObject* scalars, Call& call, uint64_t& classes) {
  const Py_ssize_t count = PyTuple_GET_SIZE(scalars);
  if (count != 0 && count != 2) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* given = PyTuple_GET_ITEM(scalars, i);
    if (!PyFloat_CheckExact(given) && !PyLong_CheckExact(given)) return false;
    const double value = PyFloat_AsDouble(given);
    if (value == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    if (!(std::fabs(value) <= kMostScalar)) return false;  // also NaN
    call.scalars[i] = value;
    classes = classes << 2 | (value == 0 ? 1 : value == 1 ? 2 : 3);
  }
  return true;
}

inline Reading read_epilogue(Arguments const& given, bool make, uint64_t& number) {
  const bool sequence = PyTuple_CheckExact(given.epilogue_args) || PyList_CheckExact(given.epilogue_args);
  if (given.epilogue == Py_None) {
    return PyTuple_CheckExact(given.epilogue_args) && PyTuple_GET_SIZE(given.epilogue_args) == 0 ? Reading::kRead : Reading::kUnusual;
  }
  if (!sequence) return Reading::kUnusual;
  if (PyCFunction_CheckExact(given.epilogue)) {  // it is its own meaning
    number = number_of(given.epilogue, make);
  } else {
    PyObject* meaning = PyObject_CallOneArg(around.meaning_of, given.epilogue);
    if (meaning == nullptr) PyErr_Clear();
    if (meaning == nullptr || meaning == Py_None) {
      Py_XDECREF(meaning);
      return Reading::kUnusual;
    }
    number = number_of(meaning, make);
    Py_DECREF(meaning);
  }
  return number != 0 ? Reading::kRead : Reading::kUnknown;
}

inline bool add_operand(PyObject* object, Call& call, int place) {
  PyObject* tensor = object;
  if (place == 1 && reinterpret_cast<PyObject*>(Py_TYPE(object)) == around.packed_type) {
    tensor = PyObject_GetAttr(object, around.tensor_name);
    if (tensor == nullptr) {
      PyErr_Clear();
      return false;
    }
    Py_DECREF(tensor);  // the operand keeps it alive
  }
  const int begin = call.key.count;
  at::Tensor const* found = call.count < kMostTensors ? add_tensor(tensor, call.key, call.data[call.count]) : nullptr;
  if (found == nullptr || (call.count > 0 && found->device() != call.read[0]->device())) return false;
  call.at[call.count] = begin;
  call.objects[call.count] = object;
  call.read[call.count++] = found;
  return true;
}

// Replace M by kRows in the part of a key that begins with ``words``. False if the tensor does not have M rows. ``columns`` is set if M is
// also the stride between columns.
inline bool separate_rows(uint64_t* words, uint64_t rows, bool& columns) {
  const auto dims = static_cast<int>(words[0] & 0xff);
  if (dims != 2 && dims != 3) return false;
  uint64_t* const size = words + dims - 1;
  if (*size != rows) return false;
  *size = kRows;
  uint64_t* const stride = words + 1 + dims;
  if (dims == 3 && stride[0] == rows * stride[1]) stride[0] = kRows;  // between dense matrices of a batch
  if (dims == 2 && words[2] > 1 && stride[1] == rows * stride[0]) {
    stride[1] = kRows;
    columns = true;
  }
  return true;
}

// Separate M from the key if the first operand is a matrix of at least two rows, or a batch of such matrices. ``out_at`` is the start of
// the result's part in the key, or 0.
inline void separate_rows(Call& call, int out_at) {
  const at::Tensor& a = *call.read[0];
  if ((a.dim() != 2 && a.dim() != 3) || a.size(-2) < 2) return;
  call.key.rows = a.size(-2);
  bool columns = false;
  for (int i = 0; i < call.count; ++i) {
    if (i != 1 && separate_rows(call.key.words + call.at[i], call.key.rows, columns)) call.following |= 1u << i;  // b has no M
  }
  if (out_at != 0) separate_rows(call.key.words + out_at, call.key.rows, columns);
  // Column alignment depends on the largest power of two in M, so the key keeps that power (RowClass.step).
  if (columns) call.key.words[call.at[0] + a.dim() - 1] -= std::gcd(call.key.rows, kAlignedBytes);
}

// Read a call. ``make`` assigns numbers to Python objects in the key that have none.
inline Reading read_call(Arguments const& given, Call& call, bool make) {
  if (!plain_thread() || given.own < 2) return Reading::kUnusual;
  const uint64_t name = number_of(given.name, make), token = settings_token();
  uint64_t classes = 0, options = 0, dtype = 0, epilogue = 0;
  if (token == 0 || !read_scalars(given.scalars, call, classes)) return Reading::kUnusual;
  if (PyTuple_GET_SIZE(given.options) != 0) options = number_of(given.options, make) << 1 | 1;
  if (given.out_dtype != Py_None) dtype = number_of(given.out_dtype, make) << 1 | 1;
  const Reading meaning = read_epilogue(given, make, epilogue);
  if (meaning == Reading::kUnusual) return meaning;

  Key& key = call.key;
  key.add(name | classes << 32);
  key.add(token);
  key.add(options);
  key.add(dtype << 32 | epilogue);
  key.add(0);  // filled in below
  for (Py_ssize_t i = 0; i < given.own; ++i) {
    if (!add_operand(given.operands[i], call, static_cast<int>(i))) return Reading::kUnusual;
  }
  if (given.brought != Py_None && !add_operand(given.brought, call, call.count)) return Reading::kUnusual;
  const Py_ssize_t extra = given.epilogue == Py_None ? 0 : PySequence_Fast_GET_SIZE(given.epilogue_args);
  for (Py_ssize_t i = 0; i < extra; ++i) {
    if (!add_operand(PySequence_Fast_GET_ITEM(given.epilogue_args, i), call, call.count)) return Reading::kUnusual;
  }
  const int out_at = given.out != Py_None ? key.count : 0;
  if (given.out != Py_None) {
    call.out = add_tensor(given.out, key, call.out_data);
    const bool counted = call.out != nullptr && (!call.out->is_inference() || c10::InferenceMode::is_enabled());
    if (!counted || call.out->device() != call.read[0]->device()) return Reading::kUnusual;
  }
  at::Tensor const& a = *call.read[0];
  int64_t flags = 0;
  if (a.is_cuda() && (flags = device_flags(a)) < 0) return Reading::kUnusual;
  const bool packed = reinterpret_cast<PyObject*>(Py_TYPE(call.objects[1])) == around.packed_type;
  key.words[4] = state_word(a, flags) | static_cast<uint64_t>(packed) << 9 | static_cast<uint64_t>(given.out != Py_None) << 10 |
                 static_cast<uint64_t>(given.brought != Py_None) << 11 | static_cast<uint64_t>(given.own) << 16 |
                 static_cast<uint64_t>(extra) << 24;
  separate_rows(call, out_at);
  const bool numbered = name != 0 && options != 1 && dtype != 1 && meaning == Reading::kRead;
  return numbered ? Reading::kRead : Reading::kUnknown;
}

}  // namespace gemmtune
