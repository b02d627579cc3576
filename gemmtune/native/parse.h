// From what gemmtune/native/records.py hands over to a Record. Functions return false with an error of Python set.
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

// Tuples of numbers, each of which ``fill`` makes one T of.
template <class T, class Fill>
bool rows_of(PyObject* tuple, std::vector<T>& found, size_t width, Fill fill) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    std::vector<int64_t> row;
    if (!numbers_of(PyTuple_GET_ITEM(tuple, i), row)) return false;
    if (row.size() != width) {
      PyErr_SetString(PyExc_ValueError, "a row of another width than expected");
      return false;
    }
    found.push_back(fill(row));
  }
  return true;
}

inline bool parse(PyObject* given, DriverLaunch& d) {
  unsigned long long launch, context, function, own_context;
  int pdl;
  const char* bytes;
  Py_ssize_t byte_count;
  PyObject *arguments, *maps, *encode, *places, *numbers, *aligned, *multiples;
  if (!PyArg_ParseTuple(given, "KKKK(III)IIIpiy#O!O!OO!O!O!O!", &launch, &context, &function, &own_context, &d.grid[0], &d.grid[1],
                        &d.grid[2], &d.cluster, &d.threads, &d.shared_bytes, &pdl, &d.skipped, &bytes, &byte_count, &PyTuple_Type,
                        &arguments, &PyTuple_Type, &maps, &encode, &PyTuple_Type, &places, &PyTuple_Type, &numbers, &PyTuple_Type,
                        &aligned, &PyTuple_Type, &multiples)) {
    return false;
  }
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
    PyErr_SetString(PyExc_ValueError, "more parameters than a kernel can have");
    return false;
  }
  using Row = std::vector<int64_t>;
  return rows_of(places, d.places, 3, [](Row const& r) { return Place{uint32_t(r[0]), int(r[1]), r[2]}; }) &&
         rows_of(numbers, d.numbers, 3, [](Row const& r) { return Number{uint32_t(r[0]), int(r[1]), r[2] != 0}; }) &&
         rows_of(aligned, d.aligned, 3, [](Row const& r) { return Aligned{uint32_t(r[0]), int(r[1]), uint64_t(r[2])}; }) &&
         rows_of(multiples, d.multiples, 2, [](Row const& r) { return Multiple{int(r[0]), uint64_t(r[1])}; });
}

inline bool parse(PyObject* given, DeviceFunction& f) {
  unsigned long long function, plan, alignment[3];
  if (!PyArg_ParseTuple(given, "KKiiii(KKK)", &function, &plan, &f.left, &f.right, &f.first, &f.count, &alignment[0], &alignment[1],
                        &alignment[2])) {
    return false;
  }
  f.function = reinterpret_cast<void*>(function);
  f.plan = reinterpret_cast<void const*>(plan);
  std::copy(alignment, alignment + 3, f.alignment);
  return true;
}

inline bool parse(PyObject* given, LibraryProduct& p) {
  unsigned long long matmul, set_attribute, handle, operation, layouts[4], workspace_bytes;
  const char* algorithm;
  Py_ssize_t algorithm_bytes;
  int scalar, known[2];
  PyObject* pointers;
  if (!PyArg_ParseTuple(given, "KKKK(KKKK)y#KCpdpdiiiO!", &matmul, &set_attribute, &handle, &operation, &layouts[0], &layouts[1],
                        &layouts[2], &layouts[3], &algorithm, &algorithm_bytes, &workspace_bytes, &scalar, &known[0], &p.scalars[0],
                        &known[1], &p.scalars[1], &p.left, &p.right, &p.added, &PyTuple_Type, &pointers)) {
    return false;
  }
  if (algorithm_bytes != static_cast<Py_ssize_t>(kAlgorithmBytes)) {
    PyErr_SetString(PyExc_ValueError, "an algorithm of cuBLASLt has 64 bytes");
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
  p.known[0] = known[0] != 0;
  p.known[1] = known[1] != 0;
  using Row = std::vector<int64_t>;
  return rows_of(pointers, p.pointers, 2, [](Row const& r) { return LibraryProduct::Pointer{int(r[0]), int(r[1])}; });
}

inline bool parse(PyObject* given, HostFunction& host) {
  unsigned long long function, plan;
  int plain, swapped, added;
  if (!PyArg_ParseTuple(given, "KKppp", &function, &plan, &plain, &swapped, &added)) return false;
  host = {reinterpret_cast<void*>(function), reinterpret_cast<void const*>(plan), plain != 0, swapped != 0, added != 0};
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

inline bool parse(PyObject* given, Record& record) {
  int kind, lengthy;
  PyObject *entry, *fresh, *into, *choice, *owner, *spans, *size, *stride, *dtype, *memory, *launch;
  if (!PyArg_ParseTuple(given, "OOOOOO!O!O!O!pOiO!", &entry, &fresh, &into, &choice, &owner, &PyTuple_Type, &spans, &PyTuple_Type, &size,
                        &PyTuple_Type, &stride, &THPDtypeType, &dtype, &lengthy, &memory, &kind, &PyTuple_Type, &launch)) {
    return false;
  }
  record.lengthy = lengthy != 0;
  record.entry = Py_NewRef(entry);
  record.fresh = Py_NewRef(fresh);
  record.into = Py_NewRef(into);
  record.owner = Py_NewRef(owner);
  if (choice != Py_None) record.choice = Py_NewRef(choice);
  record.result.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  if (!numbers_of(spans, record.spans) || !numbers_of(size, record.result.size) || !numbers_of(stride, record.result.stride)) return false;
  record.result.bytes = record.spans.empty() ? 0 : record.spans[0];
  if (!parse(memory, record.memory)) return false;
  switch (kind) {
    case 1: return parse(launch, record.launch.emplace<1>());
    case 2: return parse(launch, record.launch.emplace<2>());
    case 3: return parse(launch, record.launch.emplace<3>());
    case 4: return parse(launch, record.launch.emplace<4>());
    case 5: return parse(launch, record.launch.emplace<5>());
    default: return true;
  }
}

}  // namespace gemmtune
