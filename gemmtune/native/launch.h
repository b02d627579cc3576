// Launches as plain data, their dependence on M, and the launches that are C functions.
#pragma once
#include "memory.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

namespace gemmtune {

// ---- the dependence on M of a launch that was planned for another M ---------------------------------------------------------------

// A number of a launch: ``first`` up to M = ``base``, then ``step`` more for each further ``unit`` of rows, begun units included, up to
// ``most``. ``place`` is its position in the launch's image.
struct Following {
  uint32_t place;
  int64_t first, step, base, unit, most;

  int64_t at(int64_t rows) const {
    const int64_t units = rows > base ? (rows - base + unit - 1) / unit : 0;
    return std::min(first + step * units, most);
  }
};

// The inputs of a launch from one call.
struct Given {
  void* out;
  void const* read[kMostTensors];
  int count = 0;
  int64_t rows = 0;  // M, if the launch was planned for another M
  double const* scalars;
  void* stream = nullptr;
  Memory::OfStream memory{};
};

// The division of M rows by make_plan of backends/cpp/plan.py, and its number of threads. The first five are positions in its words.
struct HostRows {
  int m, panel, block, task, threads;
  int64_t most_panel, most_block, most_task;
  int64_t flops_per_row, bytes, bytes_per_row;
  double flops_per_thread, bytes_per_thread;

  static int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }
  // Divide ``count`` into parts of at most ``most`` and about equal size. Return that size.
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

// A function of a shared object of the cpp backend, gemmtune_product or gemmtune_gemm, with the words of its plan.
struct HostFunction {
  void* function = nullptr;
  void const* plan = nullptr;
  bool plain = false;    // gemmtune_product
  bool swapped = false;  // b comes first
  bool added = false;    // the third tensor is inp
  int words = 0;         // number of words in the plan
  HostRows rows{};
  std::vector<Following> following;  // words that HostRows does not compute, such as strides over all rows

  // Write the plan for other rows to ``memory`` and return it.
  void const* plan_for(int64_t m, int64_t* memory) const {
    std::memcpy(memory, plan, words * sizeof(int64_t));
    rows.write(memory, m);
    for (auto const& one : following) memory[one.place / sizeof(int64_t)] = one.at(m);
    return memory;
  }
  // Return the maximum number of threads. torch's setting is not read if the plan needs one.
  int threads_for(void const* planned) const {
    return words != 0 && static_cast<int64_t const*>(planned)[rows.threads] == 1 ? 1 : at::get_num_threads();
  }
};

template <size_t... I>
int call_gemm(HostFunction const& f, void const* plan, void* out, void const* a, void const* b, void const* inp, double const* scalars,
              void const* const* more, std::index_sequence<I...>) {
  using Gemm = int (*)(void const*, void*, void const*, void const*, void const*, double, double, int, decltype((void)I, (void const*)nullptr)...);
  return reinterpret_cast<Gemm>(f.function)(plan, out, a, b, inp, scalars[0], scalars[1], f.threads_for(plan), more[I]...);
}

// Return 0 on success, 1 if there was not enough memory.
inline int launch(HostFunction const& f, Given const& given) {
  void const* const* read = given.read;
  void const *a = read[f.swapped ? 1 : 0], *b = read[f.swapped ? 0 : 1];
  int64_t words[kMostWordsOfPlan];
  void const* plan = given.rows == 0 ? f.plan : f.plan_for(given.rows, words);
  if (f.plain) {
    using Product = int (*)(void const*, void*, void const*, void const*, int);
    return reinterpret_cast<Product>(f.function)(plan, given.out, a, b, f.threads_for(plan));
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

// gemmtune_call of a shared object of nvcc. It receives a block like ``struct Given`` of cutlass/launch.h.jinja.
constexpr size_t kMostBytesOfPlan = 4096;

struct DeviceFunction {
  void* function = nullptr;
  void const* plan = nullptr;
  int left = 0, right = 1, first = 2, count = 0;
  uint64_t alignment[3] = {1, 1, 1};  // of out, left, right
  void* need = nullptr;               // gemmtune_workspace_bytes, called with a plan for other rows
  size_t plan_bytes = 0;
  int64_t memory_bytes = 0;
  std::vector<Following> following;

  // Write the plan for other rows to ``memory`` and return it.
  void const* plan_for(int64_t m, char* memory) const {
    std::memcpy(memory, plan, plan_bytes);
    for (auto const& one : following) {
      const auto value = static_cast<int32_t>(one.at(m));
      std::memcpy(memory + one.place, &value, sizeof value);
    }
    return memory;
  }
};

// Return 0 on success, -1 if an operand is not aligned as planned or the memory is too small.
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

}  // namespace gemmtune
