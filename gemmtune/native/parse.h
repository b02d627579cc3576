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

inline bool parse_map(PyObject* given, TensorMap& map) {
  PyObject *sizes, *pitches, *box;
  if (!PyArg_ParseTuple(given, "iiiiO!O!O!", &map.operand, &map.data_type, &map.swizzle, &map.promotion, &PyTuple_Type, &sizes,
                        &PyTuple_Type, &pitches, &PyTuple_Type, &box)) {
    return false;
  }
  std::vector<uint64_t> all_sizes, all_pitches;
  std::vector<uint32_t> all_box;
  if (!numbers_of(sizes, all_sizes) || !numbers_of(pitches, all_pitches) || !numbers_of(box, all_box)) return false;
  map.rank = static_cast<int>(all_sizes.size());
  if (map.rank > 5 || all_box.size() != all_sizes.size() || all_pitches.size() + 1 != all_sizes.size()) {
    PyErr_SetString(PyExc_ValueError, "a tensor map of more than five dimensions, or of uneven ones");
    return false;
  }
  std::copy(all_sizes.begin(), all_sizes.end(), map.sizes);
  std::copy(all_pitches.begin(), all_pitches.end(), map.pitches);
  std::copy(all_box.begin(), all_box.end(), map.box);
  return true;
}

inline bool parse(PyObject* given, DriverLaunch& d) {
  unsigned long long launch, context, encode, function, own_context;
  int pdl;
  const char* bytes;
  Py_ssize_t byte_count;
  PyObject *arguments, *maps, *places, *numbers, *aligned, *multiples;
  if (!PyArg_ParseTuple(given, "KKKKK(III)IIIpiy#O!O!O!O!O!O!", &launch, &context, &encode, &function, &own_context, &d.grid[0],
                        &d.grid[1], &d.grid[2], &d.cluster, &d.threads, &d.shared_bytes, &pdl, &d.skipped, &bytes, &byte_count,
                        &PyTuple_Type, &arguments, &PyTuple_Type, &maps, &PyTuple_Type, &places, &PyTuple_Type, &numbers,
                        &PyTuple_Type, &aligned, &PyTuple_Type, &multiples)) {
    return false;
  }
  d.launch_kernel = reinterpret_cast<DriverLaunch::LaunchKernel>(launch);
  d.set_context = reinterpret_cast<DriverLaunch::SetContext>(context);
  d.encode_map = reinterpret_cast<DriverLaunch::EncodeMap>(encode);
  d.function = reinterpret_cast<void*>(function);
  d.context = reinterpret_cast<void*>(own_context);
  d.pdl = pdl != 0;
  d.parameters.assign(bytes, bytes + byte_count);
  if (!numbers_of(arguments, d.arguments)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(maps); ++i) {
    d.maps.emplace_back();
    if (!parse_map(PyTuple_GET_ITEM(maps, i), d.maps.back())) return false;
  }
  if (d.parameters.size() > kMostParameterBytes || d.arguments.size() > kMostParameters) {
    PyErr_SetString(PyExc_ValueError, "more parameters than a kernel can have");
    return false;
  }
  using Row = std::vector<int64_t>;
  return rows_of(places, d.places, 3, [](Row const& r) { return Place{uint32_t(r[0]), int(r[1]), r[2]}; }) &&
         rows_of(numbers, d.numbers, 2, [](Row const& r) { return Number{uint32_t(r[0]), int(r[1])}; }) &&
         rows_of(aligned, d.aligned, 3, [](Row const& r) { return Aligned{uint32_t(r[0]), int(r[1]), uint64_t(r[2])}; }) &&
         rows_of(multiples, d.multiples, 2, [](Row const& r) { return Multiple{int(r[0]), uint64_t(r[1])}; });
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

inline bool parse(PyObject* given, Record& record) {
  int kind, lengthy;
  PyObject *entry, *fresh, *into, *choice, *owner, *spans, *size, *stride, *dtype, *launch;
  if (!PyArg_ParseTuple(given, "OOOOOO!O!O!O!piO!", &entry, &fresh, &into, &choice, &owner, &PyTuple_Type, &spans, &PyTuple_Type, &size,
                        &PyTuple_Type, &stride, &THPDtypeType, &dtype, &lengthy, &kind, &PyTuple_Type, &launch)) {
    return false;
  }
  record.kind = static_cast<Kind>(kind);
  record.lengthy = lengthy != 0;
  record.entry = Py_NewRef(entry);
  record.fresh = Py_NewRef(fresh);
  record.into = Py_NewRef(into);
  record.owner = Py_NewRef(owner);
  if (choice != Py_None) record.choice = Py_NewRef(choice);
  record.result.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  if (!numbers_of(spans, record.spans) || !numbers_of(size, record.result.size) || !numbers_of(stride, record.result.stride)) return false;
  record.result.bytes = record.spans.empty() ? 0 : record.spans[0];
  switch (record.kind) {
    case Kind::kHostFunction: return parse(launch, record.host);
    case Kind::kTorch: return parse(launch, record.torch);
    case Kind::kDriver: return parse(launch, record.driver);
    default: return true;
  }
}

}  // namespace gemmtune
