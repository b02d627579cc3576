// Launches as plain data, and how they are done: C functions, kernels through the driver, products by cuBLASLt.
#pragma once
#include "memory.h"

#include <ATen/Parallel.h>

#include <array>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace gemmtune {

// What a launch is given by a call.
struct Given {
  void* out;
  void const* read[kMostTensors];
  int count = 0;
  double const* scalars;
  void* stream = nullptr;
  Memory::OfStream memory{};
};

// A function of a shared object of the cpp backend, with the plan's words: gemmtune_product or gemmtune_gemm.
struct HostFunction {
  void* function = nullptr;
  void const* plan = nullptr;
  bool plain = false;    // gemmtune_product
  bool swapped = false;  // b comes first
  bool added = false;    // the third tensor is inp
};

template <size_t... I>
int call_gemm(HostFunction const& f, void* out, void const* a, void const* b, void const* inp, double const* scalars,
              void const* const* more, std::index_sequence<I...>) {
  using Gemm = int (*)(void const*, void*, void const*, void const*, void const*, double, double, int, decltype((void)I, (void const*)nullptr)...);
  return reinterpret_cast<Gemm>(f.function)(f.plan, out, a, b, inp, scalars[0], scalars[1], at::get_num_threads(), more[I]...);
}

// 0 if done, 1 if there was not enough memory.
inline int launch(HostFunction const& f, Given const& given) {
  void const* const* read = given.read;
  void const *a = read[f.swapped ? 1 : 0], *b = read[f.swapped ? 0 : 1];
  if (f.plain) {
    using Product = int (*)(void const*, void*, void const*, void const*, int);
    return reinterpret_cast<Product>(f.function)(f.plan, given.out, a, b, at::get_num_threads());
  }
  void const* inp = f.added ? read[2] : nullptr;
  void const* const* more = read + (f.added ? 3 : 2);
  switch (given.count - (f.added ? 3 : 2)) {
    case 0: return call_gemm(f, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<0>());
    case 1: return call_gemm(f, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<1>());
    case 2: return call_gemm(f, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<2>());
    case 3: return call_gemm(f, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<3>());
    case 4: return call_gemm(f, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<4>());
    case 5: return call_gemm(f, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<5>());
    case 6: return call_gemm(f, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<6>());
    default: return 1;
  }
}

// gemmtune_call of a shared object of nvcc, which is given a block as ``struct Given`` of cutlass/launch.h.jinja.
struct DeviceFunction {
  void* function = nullptr;
  void const* plan = nullptr;
  int left = 0, right = 1, first = 2, count = 0;
  uint64_t alignment[3] = {1, 1, 1};  // of out, left, right
};

// 0 if done; -1 where an operand is not aligned as planned.
inline int launch(DeviceFunction const& f, Given const& given) {
  struct {
    void *stream, *out;
    void const *left, *right;
    void* workspace;
    double alpha, beta;
    void const* more[kMostTensors];
  } block{given.stream, given.out, given.read[f.left], given.read[f.right], nullptr, given.scalars[0], given.scalars[1], {}};
  if (given.memory.count > 0) block.workspace = reinterpret_cast<void*>(given.memory.addresses[0]);
  void const* aligned[] = {block.out, block.left, block.right};
  for (int i = 0; i < 3; ++i) {
    if (reinterpret_cast<uint64_t>(aligned[i]) % f.alignment[i]) return -1;
  }
  for (int i = 0; i < f.count; ++i) block.more[i] = given.read[f.first + i];
  return reinterpret_cast<int (*)(void const*, void const*)>(f.function)(f.plan, &block);
}

// ---- cuBLASLt, by addresses that Python found -----------------------------------------------------------------------------------

constexpr size_t kAlgorithmBytes = 64;
struct LibraryProduct {
  using Matmul = int (*)(void*, void*, void const*, void const*, void*, void const*, void*, void const*, void const*, void*, void*, void*,
                         void const*, void*, size_t, void*);
  using SetAttribute = int (*)(void*, int, void const*, size_t);
  struct Pointer {
    int attribute, place;
  };
  Matmul matmul = nullptr;
  SetAttribute set_attribute = nullptr;
  void *handle = nullptr, *operation = nullptr, *left_layout = nullptr, *right_layout = nullptr, *c_layout = nullptr, *d_layout = nullptr;
  alignas(16) char algorithm[kAlgorithmBytes] = {};
  size_t workspace_bytes = 0;
  char scalar = 'f';                    // the type of alpha and beta: f, d or i
  bool known[2] = {false, false};       // alpha and beta, before a call
  double scalars[2] = {1, 0};           // their values then
  int left = 0, right = 1, added = -1;  // places; added: of C, -1 for none
  std::vector<Pointer> pointers;        // which the operation holds
  mutable std::mutex lock;              // of the operation, where it holds pointers
};

union Scalar {
  float f;
  double d;
  int32_t i;
};

inline Scalar scalar_of(char type, double value) {
  Scalar made{};
  if (type == 'f') made.f = static_cast<float>(value);
  else if (type == 'd') made.d = value;
  else made.i = static_cast<int32_t>(value);
  return made;
}

// A cublasStatus_t.
inline int launch(LibraryProduct const& p, Given const& given) {
  const Scalar alpha = scalar_of(p.scalar, p.known[0] ? p.scalars[0] : given.scalars[0]);
  const Scalar beta = scalar_of(p.scalar, p.known[1] ? p.scalars[1] : given.scalars[1]);
  void const* c = p.added < 0 ? given.out : given.read[p.added];
  void* workspace = given.memory.count > 0 ? reinterpret_cast<void*>(given.memory.addresses[0]) : nullptr;
  std::unique_lock<std::mutex> held(p.lock, std::defer_lock);
  if (!p.pointers.empty()) held.lock();
  for (auto const& pointer : p.pointers) {
    const auto address = reinterpret_cast<uint64_t>(given.read[pointer.place]);
    if (const int status = p.set_attribute(p.operation, pointer.attribute, &address, sizeof address)) return status;
  }
  return p.matmul(p.handle, p.operation, &alpha, given.read[p.left], p.left_layout, given.read[p.right], p.right_layout, &beta, c, p.c_layout,
                  given.out, p.d_layout, p.algorithm, workspace, p.workspace_bytes, given.stream);
}

// ---- the driver, by addresses that Python found; the structs are those of cuda.h ------------------------------------------------

struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    unsigned cluster[3];
    int flag;
  } value;
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
constexpr int kClusterDimension = 4, kProgrammaticStreamSerialization = 6, kInvalidContext = 201;
constexpr size_t kMapBytes = 128, kMostParameterBytes = 4096, kMostMapsKept = 4096;
constexpr int kMostParameters = 64;

// The tensor maps of one operand, by its address; Python encodes them.
struct TensorMap {
  int operand = 0;
  std::unordered_map<uint64_t, std::array<char, kMapBytes>> known;
};
struct Place { uint32_t offset; int operand; int64_t more_bytes; };   // an operand's address
struct Number { uint32_t offset; int number; bool wide; };            // a scalar as float32, or as float64
struct Aligned { uint32_t offset; int operand; uint64_t multiple_bytes; };
struct Multiple { int operand; uint64_t bytes; };

// A toolchain.record.Record, and the kernel that is loaded for it.
struct DriverLaunch {
  using LaunchKernel = int (*)(LaunchConfig const*, void*, void**, void**);
  using SetContext = int (*)(void*);
  LaunchKernel launch_kernel = nullptr;
  SetContext set_context = nullptr;
  void *function = nullptr, *context = nullptr;
  unsigned grid[3] = {}, cluster = 0, threads = 0, shared_bytes = 0;
  bool pdl = false;
  int skipped = -1;            // the place of a tensor that the kernel is not told of
  PyObject* encode = nullptr;  // encode(number of the map, address): its bytes
  std::vector<char> parameters;
  std::vector<uint32_t> arguments;
  std::vector<TensorMap> maps;
  std::vector<Place> places;
  std::vector<Number> numbers;
  std::vector<Aligned> aligned;
  std::vector<Multiple> multiples;

  DriverLaunch() = default;
  DriverLaunch(DriverLaunch const&) = delete;
  ~DriverLaunch() { Py_XDECREF(encode); }
};

// Writes the map of an operand at an address to ``block``, while the GIL is held. False: Python says why not.
inline bool fill_map(DriverLaunch& d, size_t number, uint64_t address, char* block) {
  auto& known = d.maps[number].known;
  auto found = known.find(address);
  if (found == known.end()) {
    PyObject* encoded = PyObject_CallFunction(d.encode, "nK", static_cast<Py_ssize_t>(number), static_cast<unsigned long long>(address));
    if (encoded == nullptr || !PyBytes_Check(encoded) || PyBytes_GET_SIZE(encoded) != static_cast<Py_ssize_t>(kMapBytes)) {
      PyErr_Clear();
      Py_XDECREF(encoded);
      return false;
    }
    std::array<char, kMapBytes> bytes;
    std::memcpy(bytes.data(), PyBytes_AS_STRING(encoded), kMapBytes);
    Py_DECREF(encoded);
    if (known.size() >= kMostMapsKept) known.clear();
    found = known.insert_or_assign(address, bytes).first;
  }
  std::memcpy(block, found->second.data(), kMapBytes);
  return true;
}

// Writes all parameters to ``block``, while the GIL is held. False: this call is left to Python.
inline bool fill(DriverLaunch& d, Given const& given, char* block) {
  uint64_t addresses[kMostTensors + 2 + kMostMemories] = {reinterpret_cast<uint64_t>(given.out),
                                                          given.memory.count > 0 ? given.memory.addresses[0] : 0};
  int known = 2;
  for (int i = 0; i < given.count; ++i) {
    if (i != d.skipped) addresses[known++] = reinterpret_cast<uint64_t>(given.read[i]);
  }
  for (int i = 0; i < given.memory.count; ++i) addresses[known++] = given.memory.addresses[i];
  for (auto const& m : d.multiples) {
    if (addresses[m.operand] % m.bytes) return false;
  }
  std::memcpy(block, d.parameters.data(), d.parameters.size());
  for (size_t i = 0; i < d.maps.size(); ++i) {
    if (!fill_map(d, i, addresses[d.maps[i].operand], block + i * kMapBytes)) return false;
  }
  for (auto const& p : d.places) {
    const uint64_t address = addresses[p.operand] + p.more_bytes;
    std::memcpy(block + p.offset, &address, sizeof address);
  }
  for (auto const& n : d.numbers) {
    const double value = given.scalars[n.number];
    const float narrow = static_cast<float>(value);
    if (n.wide) std::memcpy(block + n.offset, &value, sizeof value);
    else std::memcpy(block + n.offset, &narrow, sizeof narrow);
  }
  for (auto const& flag : d.aligned) {
    if (addresses[flag.operand] % flag.multiple_bytes) block[flag.offset] = 0;
  }
  return true;
}

// A CUresult.
inline int launch(DriverLaunch const& d, char* block, void* stream) {
  void* arguments[kMostParameters];
  for (size_t i = 0; i < d.arguments.size(); ++i) arguments[i] = block + d.arguments[i];
  LaunchAttribute attributes[2] = {};
  unsigned used = 0;
  if (d.cluster != 0) {
    attributes[used].id = kClusterDimension;
    attributes[used].value.cluster[0] = d.cluster;
    attributes[used].value.cluster[1] = attributes[used].value.cluster[2] = 1;
    ++used;
  }
  if (d.pdl) {
    attributes[used].id = kProgrammaticStreamSerialization;
    attributes[used++].value.flag = 1;
  }
  const LaunchConfig config{{d.grid[0], d.grid[1], d.grid[2]}, {d.threads, 1, 1}, d.shared_bytes, stream, attributes, used};
  int status = d.launch_kernel(&config, d.function, arguments, nullptr);
  if (status == kInvalidContext) {  // the thread's first use of CUDA: no context is current to it
    status = d.set_context(d.context);
    if (status == 0) status = d.launch_kernel(&config, d.function, arguments, nullptr);
  }
  return status;
}

}  // namespace gemmtune
