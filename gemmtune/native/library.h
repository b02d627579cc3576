// Products by cuBLASLt, at addresses that Python found.
#pragma once
#include "launch.h"

#include <mutex>
#include <unordered_map>

namespace gemmtune {

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
  bool known[2] = {false, false};       // true if alpha or beta is known before a call
  double scalars[2] = {1, 0};           // the known values
  int left = 0, right = 1, added = -1;  // positions of tensors; added is C, -1 for none
  std::vector<Pointer> pointers;        // attributes of the operation that hold tensor addresses
  mutable std::mutex lock;              // guards the operation if it holds pointers
  Check check = nullptr;                // cublasLtMatmulAlgoCheck, called once for each other M
  SetAttribute set_size = nullptr;      // cublasLtMatrixLayoutSetAttribute
  std::vector<Following> following;     // numbers of layouts: kNumbers for left, right, c and d, in this order
  std::unordered_map<int64_t, bool> checked;
};

constexpr size_t kLayoutBytes = 64, kToldBytes = 56, kMostChecked = 65536;
// Attributes of a layout as in cublasLtMatrixLayoutAttribute_t: rows, columns, leading dimension, and stride of a batch.
constexpr int kNumbers[] = {2, 3, 4, 6};
constexpr size_t kNumbersOfLayout = std::size(kNumbers);

// The result of a check. The struct mirrors that of cublasLt.h.
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
      status |= p.set_size(bytes[one.place / kNumbersOfLayout], kNumbers[one.place % kNumbersOfLayout], &size, sizeof size);
    }
  }
};

// Return true if the algorithm supports other rows with the existing memory. Requires the GIL.
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

// Run the product. Return a cublasStatus_t.
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

}  // namespace gemmtune
