// Streams, and the memory that launches on them need in addition to their operands.
#pragma once
#include "key.h"

#include <optional>
#include <vector>

namespace gemmtune {

// Return the handle of the current stream. A stream keeps its handle; torch queries the current device three times before it returns it.
inline void* stream_of(c10::Device device) {
  if (device.is_cpu()) return nullptr;
  static thread_local std::optional<c10::Stream> last;
  static thread_local void* handle = nullptr;
  const c10::Stream current = c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device);
  if (last != current) {
    handle = current.native_handle();
    last = current;
  }
  return handle;
}

constexpr int kMostMemories = 3;
constexpr size_t kMostStreams = 256;

// The memory of one record's launches: requested from Python once for each stream. Everything here requires the GIL.
class Memory {
 public:
  struct OfStream {
    void* stream;
    uint64_t addresses[kMostMemories];
    int count;
    PyObject* tensors;
  };
  enum class Asking { kFound, kPython, kFailed };  // kPython: Python launches on this stream; kFailed: a Python error is set

  Memory() = default;
  Memory(Memory const&) = delete;
  ~Memory() {
    for (auto const& one : known_) Py_DECREF(one.tensors);
    Py_XDECREF(tensors_);
  }

  // Set tensors(stream) and the address of cuStreamGetCaptureInfo_v2.
  void set(PyObject* tensors, unsigned long long capture) {
    tensors_ = Py_NewRef(tensors);
    capture_ = reinterpret_cast<Capture>(capture);
  }
  bool needed() const { return tensors_ != nullptr; }

  Asking of(void* stream, OfStream& found) {
    int state = 0;
    uint64_t number = 0;
    if (capture_(stream, &state, &number, nullptr, nullptr, nullptr) != 0 || state != 0) return Asking::kPython;
    for (auto const& one : known_) {
      if (one.stream == stream) {
        found = one;
        return Asking::kFound;
      }
    }
    return known_.size() < kMostStreams ? ask(stream, found) : Asking::kPython;
  }

 private:
  using Capture = int (*)(void*, int*, uint64_t*, void*, void*, void*);

  Asking ask(void* stream, OfStream& found) {
    PyObject* handle = PyLong_FromUnsignedLongLong(reinterpret_cast<uint64_t>(stream));
    if (handle == nullptr) return Asking::kFailed;
    PyObject* given = PyObject_CallOneArg(tensors_, handle);
    Py_DECREF(handle);
    PyObject* tensors = given == nullptr ? nullptr : PySequence_Tuple(given);
    Py_XDECREF(given);
    if (tensors == nullptr) return Asking::kFailed;
    OfStream one{stream, {}, static_cast<int>(PyTuple_GET_SIZE(tensors)), tensors};
    for (int i = 0; i < one.count && i < kMostMemories; ++i) {
      PyObject* tensor = PyTuple_GET_ITEM(tensors, i);
      if (one.count > kMostMemories || !THPVariable_Check(tensor)) {
        Py_DECREF(tensors);
        PyErr_SetString(PyExc_TypeError, "expected at most three tensors as the memory of a launch");
        return Asking::kFailed;
      }
      one.addresses[i] = reinterpret_cast<uint64_t>(THPVariable_Unpack(tensor).const_data_ptr());
    }
    known_.push_back(one);
    found = one;
    return Asking::kFound;
  }

  PyObject* tensors_ = nullptr;
  Capture capture_ = nullptr;
  std::vector<OfStream> known_;
};

}  // namespace gemmtune
