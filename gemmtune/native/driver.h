// Kernel launches through the driver, by addresses that Python found. The structs mirror those of cuda.h.
#pragma once
#include "launch.h"

#include <array>
#include <unordered_map>

namespace gemmtune {

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

// The arguments of cuTensorMapEncodeTiled for a map that follows M. ``numbers`` are sizes, then pitches, kMostRank of each.
struct MapOfRows {
  int map, type, rank, swizzle, promotion;
  uint64_t numbers[kMapNumbers];
  uint32_t box[kMostRank];
};

// The tensor maps of one operand by its address. Python encodes them.
struct TensorMap {
  int operand = 0;
  int of_rows = -1;  // index among the maps that follow M
  std::unordered_map<uint64_t, std::array<char, kMapBytes>> known;
};
struct Place { uint32_t offset; int operand; int64_t more_bytes; };   // an operand's address
struct Number { uint32_t offset; int number; bool wide; };            // a scalar, as float32 or float64
struct Aligned { uint32_t offset; int operand; uint64_t multiple_bytes; };
struct Multiple { int operand; uint64_t bytes; };

// A toolchain.record.Record with its loaded kernel.
struct DriverLaunch {
  using LaunchKernel = int (*)(LaunchConfig const*, void*, void**, void**);
  using SetContext = int (*)(void*);
  using Encode = int (*)(void*, int, uint32_t, void*, uint64_t const*, uint64_t const*, uint32_t const*, uint32_t const*, int, int, int, int);
  LaunchKernel launch_kernel = nullptr;
  SetContext set_context = nullptr;
  void *function = nullptr, *context = nullptr;
  unsigned grid[3] = {}, cluster = 0, threads = 0, shared_bytes = 0;
  bool pdl = false;
  int skipped = -1;            // position of a tensor that the kernel does not receive
  PyObject* encode = nullptr;  // encode(number of the map, address): the bytes of the map
  std::vector<char> parameters;
  std::vector<uint32_t> arguments;
  std::vector<TensorMap> maps;
  std::vector<Place> places;
  std::vector<Number> numbers;
  std::vector<Aligned> aligned;
  std::vector<Multiple> multiples;
  // Numbers of the image that follow M. The image is the grid, the parameters, then numbers of 8 bytes: the offset that is added to each
  // address, and kMapNumbers for each map that follows M.
  std::vector<Following> following;
  std::vector<MapOfRows> maps_of_rows;
  Encode encode_map = nullptr;

  DriverLaunch() = default;
  DriverLaunch(DriverLaunch const&) = delete;
  ~DriverLaunch() { Py_XDECREF(encode); }
};

// The arguments of one launch.
struct Filled {
  alignas(kMapBytes) char block[kMostParameterBytes];
  unsigned grid[3];
  int64_t more_bytes[kMostParameters];
  uint64_t numbers[kMostMapsOfRows][kMapNumbers];
};

// Write grid, parameters and map numbers as planned, or for ``rows`` rows if that is not 0.
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

// Write the map of an operand at an address, with the numbers for other rows. False: Python reports the error.
inline bool encode_map(DriverLaunch const& d, int number, uint64_t address, Filled& filled) {
  auto const& map = d.maps_of_rows[number];
  static constexpr uint32_t ones[kMostRank] = {1, 1, 1, 1, 1};
  return d.encode_map(filled.block + map.map * kMapBytes, map.type, map.rank, reinterpret_cast<void*>(address), filled.numbers[number],
                      filled.numbers[number] + kMostRank, map.box, ones, 0, map.swizzle, map.promotion, 0) == 0;
}

// Write the map of an operand at an address to ``block``. Requires the GIL. False: Python reports the error.
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

// Write all arguments of a launch. Requires the GIL. False: this call is left to Python.
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

// Launch the kernel. Return a CUresult.
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
