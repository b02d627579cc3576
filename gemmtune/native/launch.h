// Launches as plain data, and how they are done: C functions, kernels through the driver, products by cuBLASLt.
#pragma once
#include "memory.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace gemmtune {

// ---- what follows M, of a launch that was planned for another one ---------------------------------------------------------------

// A number of a launch: ``first`` up to M = ``base``, ``step`` more for each further ``unit`` of rows or part of one, at most ``most``.
// ``place`` is where it is in the launch's image.
struct Following {
  uint32_t place;
  int64_t first, step, base, unit, most;

  int64_t at(int64_t rows) const {
    const int64_t units = rows > base ? (rows - base + unit - 1) / unit : 0;
    return std::min(first + step * units, most);
  }
};

// What a launch is given by a call.
struct Given {
  void* out;
  void const* read[kMostTensors];
  int count = 0;
  int64_t rows = 0;  // M, where the launch was planned for another one
  double const* scalars;
  void* stream = nullptr;
  Memory::OfStream memory{};
};

// How make_plan of backends/cpp/plan.py divides M rows, and how many threads it wants: places in the plan's words, and what they are of.
struct HostRows {
  int m, panel, block, task, threads;
  int64_t most_panel, most_block, most_task;
  int64_t flops_per_row, bytes, bytes_per_row;
  double flops_per_thread, bytes_per_thread;

  static int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }
  // The size of parts of at most ``most`` into which ``count`` falls, made about equal.
  static int64_t even(int64_t count, int64_t most) {
    return std::max<int64_t>(1, parts(count, std::max<int64_t>(1, parts(count, most))));
  }

  void write(int64_t* words, int64_t rows) const {
    const int64_t rows_of_panel = even(rows, most_panel), panels = parts(rows, rows_of_panel);
    words[m] = rows;
    words[panel] = rows_of_panel;
    words[block] = even(panels, std::max<int64_t>(1, most_block / rows_of_panel)) * rows_of_panel;
    words[task] = even(panels, most_task);
    const double work = static_cast<double>(flops_per_row * rows) / flops_per_thread +
                        static_cast<double>(bytes + bytes_per_row * rows) / bytes_per_thread;
    words[threads] = std::max<int64_t>(1, static_cast<int64_t>(work));
  }
};

constexpr int kMostWordsOfPlan = 256;

// A function of a shared object of the cpp backend, with the plan's words: gemmtune_product or gemmtune_gemm.
struct HostFunction {
  void* function = nullptr;
  void const* plan = nullptr;
  bool plain = false;    // gemmtune_product
  bool swapped = false;  // b comes first
  bool added = false;    // the third tensor is inp
  int words = 0;         // of the plan
  HostRows rows{};

  // The plan for other rows, written to ``memory``.
  void const* plan_for(int64_t m, int64_t* memory) const {
    std::memcpy(memory, plan, words * sizeof(int64_t));
    rows.write(memory, m);
    return memory;
  }
};

template <size_t... I>
int call_gemm(HostFunction const& f, void const* plan, void* out, void const* a, void const* b, void const* inp, double const* scalars,
              void const* const* more, std::index_sequence<I...>) {
  using Gemm = int (*)(void const*, void*, void const*, void const*, void const*, double, double, int, decltype((void)I, (void const*)nullptr)...);
  return reinterpret_cast<Gemm>(f.function)(plan, out, a, b, inp, scalars[0], scalars[1], at::get_num_threads(), more[I]...);
}

// 0 if done, 1 if there was not enough memory.
inline int launch(HostFunction const& f, Given const& given) {
  void const* const* read = given.read;
  void const *a = read[f.swapped ? 1 : 0], *b = read[f.swapped ? 0 : 1];
  int64_t words[kMostWordsOfPlan];
  void const* plan = given.rows == 0 ? f.plan : f.plan_for(given.rows, words);
  if (f.plain) {
    using Product = int (*)(void const*, void*, void const*, void const*, int);
    return reinterpret_cast<Product>(f.function)(plan, given.out, a, b, at::get_num_threads());
  }
  void const* inp = f.added ? read[2] : nullptr;
  void const* const* more = read + (f.added ? 3 : 2);
  switch (given.count - (f.added ? 3 : 2)) {
    case 0: return call_gemm(f, plan, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<0>());
    case 1: return call_gemm(f, plan, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<1>());
    case 2: return call_gemm(f, plan, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<2>());
    case 3: return call_gemm(f, plan, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<3>());
    case 4: return call_gemm(f, plan, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<4>());
    case 5: return call_gemm(f, plan, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<5>());
    case 6: return call_gemm(f, plan, given.out, a, b, inp, given.scalars, more, std::make_index_sequence<6>());
    default: return 1;
  }
}

// gemmtune_call of a shared object of nvcc, which is given a block as ``struct Given`` of cutlass/launch.h.jinja.
constexpr size_t kMostBytesOfPlan = 4096;

struct DeviceFunction {
  void* function = nullptr;
  void const* plan = nullptr;
  int left = 0, right = 1, first = 2, count = 0;
  uint64_t alignment[3] = {1, 1, 1};  // of out, left, right
  void* need = nullptr;               // gemmtune_workspace_bytes, asked of a plan for other rows
  size_t plan_bytes = 0;
  int64_t memory_bytes = 0;
  std::vector<Following> following;

  // The plan for other rows, written to ``memory``.
  void const* plan_for(int64_t m, char* memory) const {
    std::memcpy(memory, plan, plan_bytes);
    for (auto const& one : following) {
      const auto value = static_cast<int32_t>(one.at(m));
      std::memcpy(memory + one.place, &value, sizeof value);
    }
    return memory;
  }
};

// 0 if done; -1 where an operand is not aligned as planned, or the memory is not enough.
inline int launch(DeviceFunction const& f, Given const& given) {
  alignas(16) char memory[kMostBytesOfPlan];
  void const* plan = given.rows == 0 ? f.plan : f.plan_for(given.rows, memory);
  if (given.rows != 0 && reinterpret_cast<long long (*)(void const*)>(f.need)(plan) > f.memory_bytes) return -1;
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
  return reinterpret_cast<int (*)(void const*, void const*)>(f.function)(plan, &block);
}

// ---- cuBLASLt, by addresses that Python found -----------------------------------------------------------------------------------

constexpr size_t kAlgorithmBytes = 64;
struct LibraryProduct {
  using Matmul = int (*)(void*, void*, void const*, void const*, void*, void const*, void*, void const*, void const*, void*, void*, void*,
                         void const*, void*, size_t, void*);
  using SetAttribute = int (*)(void*, int, void const*, size_t);
  using Check = int (*)(void*, void*, void*, void*, void*, void*, void const*, void*);
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
  Check check = nullptr;                // cublasLtMatmulAlgoCheck, asked once for each other M
  SetAttribute set_size = nullptr;      // cublasLtMatrixLayoutSetAttribute
  std::vector<Following> following;     // sizes of layouts: rows and columns of left, right, c and d, in this order
  std::unordered_map<int64_t, bool> checked;
};

constexpr size_t kLayoutBytes = 64, kMostChecked = 65536;
constexpr int kRowsAttribute = 2;  // and behind it that of columns

// The answer of a check; the struct is that of cublasLt.h.
struct Checked {
  char algorithm[kAlgorithmBytes];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

// The layouts of left, right, c and d for other rows.
struct Layouts {
  alignas(16) char bytes[4][kLayoutBytes];
  int status = 0;

  Layouts(LibraryProduct const& p, int64_t rows) {
    void const* planned[] = {p.left_layout, p.right_layout, p.c_layout, p.d_layout};
    for (int i = 0; i < 4; ++i) std::memcpy(bytes[i], planned[i], kLayoutBytes);
    for (auto const& one : p.following) {
      const auto size = static_cast<uint64_t>(one.at(rows));
      status |= p.set_size(bytes[one.place / 2], kRowsAttribute + static_cast<int>(one.place % 2), &size, sizeof size);
    }
  }
};

// Whether the algorithm does other rows with the memory that there is, while the GIL is held.
inline bool allowed(LibraryProduct& p, int64_t rows) {
  const auto known = p.checked.find(rows);
  if (known != p.checked.end()) return known->second;
  Layouts layouts(p, rows);
  alignas(16) char algorithm[kAlgorithmBytes];
  std::memcpy(algorithm, p.algorithm, kAlgorithmBytes);
  Checked answer{};
  const bool right = layouts.status == 0 &&
                     p.check(p.handle, p.operation, layouts.bytes[0], layouts.bytes[1], layouts.bytes[2], layouts.bytes[3], algorithm,
                             &answer) == 0 &&
                     answer.workspace_bytes <= p.workspace_bytes;
  if (p.checked.size() >= kMostChecked) p.checked.clear();
  p.checked.emplace(rows, right);
  return right;
}

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
  if (given.rows != 0) {
    Layouts layouts(p, given.rows);
    return p.matmul(p.handle, p.operation, &alpha, given.read[p.left], layouts.bytes[0], given.read[p.right], layouts.bytes[1], &beta, c,
                    layouts.bytes[2], given.out, layouts.bytes[3], p.algorithm, workspace, p.workspace_bytes, given.stream);
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
constexpr int kMostParameters = 64, kMostRank = 5, kMapNumbers = 2 * kMostRank, kMostMapsOfRows = 8;
constexpr uint32_t kGridBytes = 12;

// The arguments of cuTensorMapEncodeTiled for a map of which numbers follow M: sizes, then pitches, kMostRank of each.
struct MapOfRows {
  int map, type, rank, swizzle, promotion;
  uint64_t numbers[kMapNumbers];
  uint32_t box[kMostRank];
};

// The tensor maps of one operand, by its address; Python encodes them.
struct TensorMap {
  int operand = 0;
  int of_rows = -1;  // the place among the maps that follow M
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
  using Encode = int (*)(void*, int, uint32_t, void*, uint64_t const*, uint64_t const*, uint32_t const*, uint32_t const*, int, int, int, int);
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
  // Of the image: the grid, the parameters, then numbers of 8 bytes: what is added to each address, and kMapNumbers of each map that
  // follows M.
  std::vector<Following> following;
  std::vector<MapOfRows> maps_of_rows;
  Encode encode_map = nullptr;

  DriverLaunch() = default;
  DriverLaunch(DriverLaunch const&) = delete;
  ~DriverLaunch() { Py_XDECREF(encode); }
};

// What a call is given beside its addresses.
struct Filled {
  alignas(kMapBytes) char block[kMostParameterBytes];
  unsigned grid[3];
  int64_t more_bytes[kMostParameters];
  uint64_t numbers[kMostMapsOfRows][kMapNumbers];
};

// Writes grid, parameters and numbers of maps as they were planned, or with what other rows change.
inline void plan(DriverLaunch const& d, int64_t rows, Filled& filled) {
  std::memcpy(filled.block, d.parameters.data(), d.parameters.size());
  std::copy(d.grid, d.grid + 3, filled.grid);
  for (size_t i = 0; i < d.places.size(); ++i) filled.more_bytes[i] = d.places[i].more_bytes;
  if (rows == 0) return;
  for (size_t i = 0; i < d.maps_of_rows.size(); ++i) std::memcpy(filled.numbers[i], d.maps_of_rows[i].numbers, sizeof filled.numbers[i]);
  const size_t addresses_at = kGridBytes + d.parameters.size(), maps_at = addresses_at + 8 * d.places.size();
  for (auto const& one : d.following) {
    const int64_t value = one.at(rows);
    const auto narrow = static_cast<uint32_t>(value);
    if (one.place < kGridBytes) {
      filled.grid[one.place / 4] = narrow;
    } else if (one.place < addresses_at) {
      std::memcpy(filled.block + one.place - kGridBytes, &narrow, sizeof narrow);
    } else if (one.place < maps_at) {
      filled.more_bytes[(one.place - addresses_at) / 8] = value;
    } else {
      const size_t number = (one.place - maps_at) / 8;
      filled.numbers[number / kMapNumbers][number % kMapNumbers] = static_cast<uint64_t>(value);
    }
  }
}

// Writes the map of an operand at an address, with the numbers of other rows. False: Python says why not.
inline bool encode_map(DriverLaunch const& d, int number, uint64_t address, Filled& filled) {
  auto const& map = d.maps_of_rows[number];
  static constexpr uint32_t ones[kMostRank] = {1, 1, 1, 1, 1};
  return d.encode_map(filled.block + map.map * kMapBytes, map.type, map.rank, reinterpret_cast<void*>(address), filled.numbers[number],
                      filled.numbers[number] + kMostRank, map.box, ones, 0, map.swizzle, map.promotion, 0) == 0;
}

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

// Writes all that a launch is told, while the GIL is held. False: this call is left to Python.
inline bool fill(DriverLaunch& d, Given const& given, Filled& filled) {
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
  plan(d, given.rows, filled);
  char* block = filled.block;
  for (size_t i = 0; i < d.maps.size(); ++i) {
    const uint64_t address = addresses[d.maps[i].operand];
    const int of_rows = given.rows != 0 ? d.maps[i].of_rows : -1;
    if (of_rows >= 0 ? !encode_map(d, of_rows, address, filled) : !fill_map(d, i, address, block + i * kMapBytes)) return false;
  }
  for (size_t i = 0; i < d.places.size(); ++i) {
    const uint64_t address = addresses[d.places[i].operand] + filled.more_bytes[i];
    std::memcpy(block + d.places[i].offset, &address, sizeof address);
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
inline int launch(DriverLaunch const& d, Filled& filled, void* stream) {
  void* arguments[kMostParameters];
  for (size_t i = 0; i < d.arguments.size(); ++i) arguments[i] = filled.block + d.arguments[i];
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
  const LaunchConfig config{{filled.grid[0], filled.grid[1], filled.grid[2]}, {d.threads, 1, 1}, d.shared_bytes, stream, attributes, used};
  int status = d.launch_kernel(&config, d.function, arguments, nullptr);
  if (status == kInvalidContext) {  // the thread's first use of CUDA: no context is current to it
    status = d.set_context(d.context);
    if (status == 0) status = d.launch_kernel(&config, d.function, arguments, nullptr);
  }
  return status;
}

}  // namespace gemmtune
