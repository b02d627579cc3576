// Conversion of tuples from gemmtune/native/records.py to a Record. Functions return false with a Python error set.
#pragma once
#include "table.h"

#include <torch/csrc/Dtype.h>

namespace gemmtune {

template <class T>
bool numbers_of(PyObject* tuple, std::vector<T>& found) {
  const Py_ssize_t count = PyTuple_GET_SIZE(tuple);
  for (Py_ssize_t i = 0; i < count; ++i) found.push_back(static_cast<T>(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i))));
  return PyErr_Occurred() == nullptr;
}

// Read tuples of numbers. ``fill`` converts each one to a T.
template <class T, class Fill>
bool rows_of(PyObject* tuple, std::vector<T>& found, size_t width, Fill fill) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    std::vector<int64_t> row;
    if (!numbers_of(PyTuple_GET_ITEM(tuple, i), row)) return false;
    if (row.size() != width) {
      PyErr_Format(PyExc_ValueError, "got a row of %zu numbers, expected %zu", row.size(), width);
      return false;
    }
    found.push_back(fill(row));
  }
  return true;
}

inline bool following_of(PyObject* tuple, std::vector<Following>& found) {
  return rows_of(tuple, found, 6, [](std::vector<int64_t> const& r) {
    return Following{uint32_t(r[0]), r[1], r[2], r[3], std::max<int64_t>(1, r[4]), r[5]};
  });
}

// maps: (number of the map, type, rank, swizzle, promotion, sizes, pitches, box), the last three with kMostRank numbers each.
inline bool parse_maps(PyObject* maps, DriverLaunch& d) {
  constexpr size_t kFirst = 5;
  std::vector<std::vector<int64_t>> rows;
  if (!rows_of(maps, rows, kFirst + kMapNumbers + kMostRank, [](std::vector<int64_t> const& r) { return r; })) return false;
  for (auto const& r : rows) {
    MapOfRows made{int(r[0]), int(r[1]), int(r[2]), int(r[3]), int(r[4]), {}, {}};
    std::copy_n(r.begin() + kFirst, kMapNumbers, made.numbers);
    std::copy_n(r.begin() + kFirst + kMapNumbers, kMostRank, made.box);
    if (r[0] < 0 || r[0] >= int64_t(d.maps.size()) || d.maps_of_rows.size() >= kMostMapsOfRows) {
      PyErr_SetString(PyExc_ValueError, "got a tensor map that the launch does not have");
      return false;
    }
    d.maps[r[0]].of_rows = static_cast<int>(d.maps_of_rows.size());
    d.maps_of_rows.push_back(made);
  }
  return true;
}

inline bool parse(PyObject* given, DriverLaunch& d) {
  unsigned long long launch, context, function, own_context, encode_map;
  int pdl;
  const char* bytes;
  Py_ssize_t byte_count;
  PyObject *arguments, *maps, *encode, *places, *numbers, *aligned, *multiples, *following, *of_rows;
  if (!PyArg_ParseTuple(given, "KKKK(III)IIIpiy#O!O!OO!O!O!O!O!O!K", &launch, &context, &function, &own_context, &d.grid[0], &d.grid[1],
                        &d.grid[2], &d.cluster, &d.threads, &d.shared_bytes, &pdl, &d.skipped, &bytes, &byte_count, &PyTuple_Type,
                        &arguments, &PyTuple_Type, &maps, &encode, &PyTuple_Type, &places, &PyTuple_Type, &numbers, &PyTuple_Type,
                        &aligned, &PyTuple_Type, &multiples, &PyTuple_Type, &following, &PyTuple_Type, &of_rows, &encode_map)) {
    return false;
  }
  d.encode_map = reinterpret_cast<DriverLaunch::Encode>(encode_map);
  d.launch_kernel = reinterpret_cast<DriverLaunch::LaunchKernel>(launch);
  d.set_context = reinterpret_cast<DriverLaunch::SetContext>(context);
  d.function = reinterpret_cast<void*>(function);
  d.context = reinterpret_cast<void*>(own_context);
  d.pdl = pdl != 0;
  d.encode = Py_NewRef(encode);
  d.parameters.assign(bytes, bytes + byte_count);
  std::vector<int> operands;
  if (!numbers_of(arguments, d.arguments) || !numbers_of(maps, operands)) return false;
  for (const int operand : operands) d.maps.emplace_back().operand = operand;
  if (d.parameters.size() > kMostParameterBytes || d.arguments.size() > kMostParameters) {
    PyErr_SetString(PyExc_ValueError, "got more parameters than a kernel can have");
    return false;
  }
  if (PyTuple_GET_SIZE(places) > kMostParameters) {
    PyErr_SetString(PyExc_ValueError, "got more addresses than a kernel can have");
    return false;
  }
  using Row = std::vector<int64_t>;
  return following_of(following, d.following) && parse_maps(of_rows, d) && rows_of(places, d.places, 3, [](Row const& r) { return Place{uint32_t(r[0]), int(r[1]), r[2]}; }) &&
         rows_of(numbers, d.numbers, 3, [](Row const& r) { return Number{uint32_t(r[0]), int(r[1]), r[2] != 0}; }) &&
         rows_of(aligned, d.aligned, 3, [](Row const& r) { return Aligned{uint32_t(r[0]), int(r[1]), uint64_t(r[2])}; }) &&
         rows_of(multiples, d.multiples, 2, [](Row const& r) { return Multiple{int(r[0]), uint64_t(r[1])}; });
}

inline bool parse(PyObject* given, DeviceFunction& f) {
  unsigned long long function, plan, alignment[3], need, plan_bytes;
  long long memory_bytes;
  PyObject* following;
  if (!PyArg_ParseTuple(given, "KKiiii(KKK)KKLO!", &function, &plan, &f.left, &f.right, &f.first, &f.count, &alignment[0], &alignment[1],
                        &alignment[2], &need, &plan_bytes, &memory_bytes, &PyTuple_Type, &following)) {
    return false;
  }
  if (plan_bytes > kMostBytesOfPlan) {
    PyErr_SetString(PyExc_ValueError, "got a plan of more than 4096 bytes");
    return false;
  }
  f.need = reinterpret_cast<void*>(need);
  f.plan_bytes = plan_bytes;
  f.memory_bytes = memory_bytes;
  f.function = reinterpret_cast<void*>(function);
  f.plan = reinterpret_cast<void const*>(plan);
  std::copy(alignment, alignment + 3, f.alignment);
  return following_of(following, f.following);
}

inline bool parse(PyObject* given, LibraryProduct& p) {
  unsigned long long matmul, set_attribute, handle, operation, layouts[4], workspace_bytes, check, set_size;
  const char* algorithm;
  Py_ssize_t algorithm_bytes;
  int scalar, known[2];
  PyObject *pointers, *following;
  if (!PyArg_ParseTuple(given, "KKKK(KKKK)y#KCpdpdiiiO!KKO!", &matmul, &set_attribute, &handle, &operation, &layouts[0], &layouts[1],
                        &layouts[2], &layouts[3], &algorithm, &algorithm_bytes, &workspace_bytes, &scalar, &known[0], &p.scalars[0],
                        &known[1], &p.scalars[1], &p.left, &p.right, &p.added, &PyTuple_Type, &pointers, &check, &set_size,
                        &PyTuple_Type, &following)) {
    return false;
  }
  if (algorithm_bytes != static_cast<Py_ssize_t>(kAlgorithmBytes)) {
    PyErr_SetString(PyExc_ValueError, "got an algorithm of another size, expected the 64 bytes of cuBLASLt");
    return false;
  }
  const auto at = [](unsigned long long address) { return reinterpret_cast<void*>(address); };
  p.matmul = reinterpret_cast<LibraryProduct::Matmul>(matmul);
  p.set_attribute = reinterpret_cast<LibraryProduct::SetAttribute>(set_attribute);
  p.handle = at(handle);
  p.operation = at(operation);
  p.left_layout = at(layouts[0]);
  p.right_layout = at(layouts[1]);
  p.c_layout = at(layouts[2]);
  p.d_layout = at(layouts[3]);
  std::memcpy(p.algorithm, algorithm, kAlgorithmBytes);
  p.workspace_bytes = workspace_bytes;
  p.scalar = static_cast<char>(scalar);
  p.check = reinterpret_cast<LibraryProduct::Check>(check);
  p.set_size = reinterpret_cast<LibraryProduct::SetAttribute>(set_size);
  if (!following_of(following, p.following)) return false;
  p.known[0] = known[0] != 0;
  p.known[1] = known[1] != 0;
  using Row = std::vector<int64_t>;
  return rows_of(pointers, p.pointers, 2, [](Row const& r) { return LibraryProduct::Pointer{int(r[0]), int(r[1])}; });
}

inline bool parse(PyObject* given, HostFunction& host) {
  unsigned long long function, plan;
  int plain, swapped, added;
  HostRows& r = host.rows;
  long long numbers[6];
  PyObject* following;
  if (!PyArg_ParseTuple(given, "KKpppi(iiiii)(LLL)(LLL)(dd)O!", &function, &plan, &plain, &swapped, &added, &host.words, &r.m, &r.panel,
                        &r.block, &r.task, &r.threads, &numbers[0], &numbers[1], &numbers[2], &numbers[3], &numbers[4], &numbers[5],
                        &r.flops_per_thread, &r.bytes_per_thread, &PyTuple_Type, &following)) {
    return false;
  }
  if (!following_of(following, host.following)) return false;
  if (host.words > kMostWordsOfPlan || std::max({r.m, r.panel, r.block, r.task, r.threads}) >= std::max(host.words, 1)) {
    PyErr_SetString(PyExc_ValueError, "got a plan of more than 256 words, or a position outside the plan");
    return false;
  }
  for (auto const& one : host.following) {
    if (one.place / sizeof(int64_t) >= static_cast<size_t>(host.words)) {
      PyErr_SetString(PyExc_ValueError, "got a word outside the plan");
      return false;
    }
  }
  host.function = reinterpret_cast<void*>(function);
  host.plan = reinterpret_cast<void const*>(plan);
  host.plain = plain != 0;
  host.swapped = swapped != 0;
  host.added = added != 0;
  r.most_panel = numbers[0];
  r.most_block = numbers[1];
  r.most_task = numbers[2];
  r.flops_per_row = numbers[3];
  r.bytes = numbers[4];
  r.bytes_per_row = numbers[5];
  return true;
}

inline bool parse(PyObject* given, TorchOperation& torch) {
  int operation, added;
  if (!PyArg_ParseTuple(given, "ii", &operation, &added)) return false;
  torch = {static_cast<Operation>(operation), static_cast<Added>(added)};
  return true;
}

// memory: None, or (tensors, capture).
inline bool parse(PyObject* given, Memory& memory) {
  if (given == Py_None) return true;
  PyObject* tensors;
  unsigned long long capture;
  if (!PyArg_ParseTuple(given, "OK", &tensors, &capture)) return false;
  memory.set(tensors, capture);
  return true;
}

inline bool parse_launch(int kind, PyObject* launch, Record& record) {
  switch (kind) {
    case 1: return parse(launch, record.launch.emplace<1>());
    case 2: return parse(launch, record.launch.emplace<2>());
    case 3: return parse(launch, record.launch.emplace<3>());
    case 4: return parse(launch, record.launch.emplace<4>());
    case 5: return parse(launch, record.launch.emplace<5>());
    default: return true;
  }
}

inline bool parse_layout(PyObject* size, PyObject* stride, Result& result) {
  std::vector<int64_t> sizes, strides;
  if (!numbers_of(size, sizes) || !numbers_of(stride, strides)) return false;
  if (sizes.size() > size_t(kMostDims) || sizes.size() != strides.size()) {
    PyErr_SetString(PyExc_ValueError, "got a result of more than 8 dimensions, or strides for another number of dimensions");
    return false;
  }
  result.dims = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), result.size);
  std::copy(strides.begin(), strides.end(), result.stride);
  return true;
}

inline bool parse(PyObject* given, Record& record) {
  int kind;
  long long lo, hi, lengthy_from;
  PyObject *entry, *fresh, *into, *choice, *owner, *size, *stride, *dtype, *memory, *launch;
  if (!PyArg_ParseTuple(given, "OOOOOiO!O!O!LLLOiO!", &entry, &fresh, &into, &choice, &owner, &record.tensors, &PyTuple_Type, &size,
                        &PyTuple_Type, &stride, &THPDtypeType, &dtype, &lengthy_from, &lo, &hi, &memory, &kind, &PyTuple_Type,
                        &launch)) {
    return false;
  }
  record.lengthy_from = lengthy_from;
  record.lo = lo;
  record.hi = hi;
  record.entry = Py_NewRef(entry);
  record.fresh = Py_NewRef(fresh);
  record.into = Py_NewRef(into);
  record.owner = Py_NewRef(owner);
  if (choice != Py_None) record.choice = Py_NewRef(choice);
  record.result.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  return parse_layout(size, stride, record.result) && parse(memory, record.memory) && parse_launch(kind, launch, record);
}

// Return the arguments of a launch for ``rows`` rows, without addresses.
inline PyObject* image(Launch const& launch, int64_t rows) {
  std::vector<char> bytes;
  const auto add = [&](void const* from, size_t count) { bytes.insert(bytes.end(), static_cast<char const*>(from), static_cast<char const*>(from) + count); };
  if (auto const* host = std::get_if<HostFunction>(&launch)) {
    int64_t words[kMostWordsOfPlan];
    add(host->plan_for(rows, words), host->words * sizeof(int64_t));
  } else if (auto const* device = std::get_if<DeviceFunction>(&launch)) {
    char memory[kMostBytesOfPlan];
    add(device->plan_for(rows, memory), device->plan_bytes);
  } else if (auto const* library = std::get_if<LibraryProduct>(&launch)) {
    const Layouts layouts(*library, rows);
    for (auto const& layout : layouts.bytes) add(layout, kToldBytes);
  } else if (auto const* driver = std::get_if<DriverLaunch>(&launch)) {
    Filled filled;
    plan(*driver, rows, filled);
    add(filled.grid, sizeof filled.grid);
    add(filled.block, driver->parameters.size());
    add(filled.more_bytes, driver->places.size() * sizeof filled.more_bytes[0]);
    add(filled.numbers, driver->maps_of_rows.size() * sizeof filled.numbers[0]);
  }
  return PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
}

}  // namespace gemmtune
