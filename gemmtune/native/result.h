// Results that are allocated natively, and torch's own operations, entered below autograd.
#pragma once
#include "key.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm_native.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_native.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/ops/mm_native.h>
#include <ATen/ops/mm_ops.h>

#include <cstdlib>
#include <vector>

namespace gemmtune {

enum class Operation : int { kMm, kBmm, kAddmm, kBaddbmm };
enum class Added : int { kAsGiven, kVector, kMatrix };
struct TorchOperation {
  Operation operation = Operation::kMm;
  Added added = Added::kAsGiven;
};

// Return inp in the form that the operation takes.
inline at::Tensor added(TorchOperation const& t, at::Tensor const* const* read) {
  at::Tensor const& inp = *read[2];
  if (t.added == Added::kMatrix) return inp.expand({read[0]->size(0), read[1]->size(1)});
  return t.added == Added::kVector && inp.dim() == 2 ? inp.select(0, 0) : inp;
}

// A kernel of torch without its checks of shapes and types, which the plan has passed. This saves 0.06 µs.
template <class Kernel>
struct Entered final : Kernel {
  at::Tensor const& out;
  explicit Entered(at::Tensor const& result) : out(result) {}
  at::Tensor const& maybe_get_output(int64_t) override { return out; }
};

inline void launch(TorchOperation const& t, at::Tensor& out, at::Tensor const* const* read, double const* scalars) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor const &a = *read[0], &b = *read[1];
  const bool cpu = a.is_cpu();
  const c10::DispatchKeySet keys(cpu ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  switch (t.operation) {
    case Operation::kMm:
      if (cpu) Entered<at::native::structured_mm_out_cpu>(out).impl(a, b, out);
      else at::_ops::mm_out::redispatch(keys, a, b, out);
      break;
    case Operation::kBmm:
      if (cpu) Entered<at::native::structured_bmm_out_cpu>(out).impl(a, b, out);
      else at::_ops::bmm_out::redispatch(keys, a, b, out);
      break;
    case Operation::kAddmm: {
      const at::Tensor inp = added(t, read);
      if (cpu) Entered<at::native::structured_addmm_out_cpu>(out).impl(inp, a, b, scalars[1], scalars[0], out);
      else at::_ops::addmm_out::redispatch(keys, inp, a, b, scalars[1], scalars[0], out);
      break;
    }
    default:
      cpu ? at::cpu::baddbmm_out(out, *read[2], a, b, scalars[1], scalars[0])
          : at::_ops::baddbmm_out::redispatch(keys, *read[2], a, b, scalars[1], scalars[0], out);
  }
}

constexpr int kMostDims = 8;
struct Result {
  int dims = 0;
  int64_t size[kMostDims], stride[kMostDims];
  at::ScalarType dtype = at::kFloat;

  c10::IntArrayRef sizes() const { return {size, static_cast<size_t>(dims)}; }
  c10::IntArrayRef strides() const { return {stride, static_cast<size_t>(dims)}; }
};

// Return the bytes from the first to just past the last element. No size is 0.
inline size_t span_bytes(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  return (last + 1) * c10::elementSize(dtype);
}

inline at::Tensor tensor_of(Result const& r, size_t bytes, c10::DataPtr data, c10::Allocator* allocator) {
  const auto key = data.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), allocator,
                                                       /*resizable=*/true);
  at::Tensor made = at::detail::make_tensor_base<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                                  c10::scalarTypeToTypeMeta(r.dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(r.sizes(), r.strides());
  return made;
}

// Return torch's allocator on the current GPU, from a tensor that torch made. torch does not replace an allocator that has given memory.
inline c10::Allocator* allocator_of_cuda() {
  static c10::Allocator* const found =
      at::_ops::empty_strided::redispatch(c10::DispatchKeySet(c10::DispatchKey::CUDA), {1}, {1}, at::kByte, std::nullopt,
                                          c10::Device(c10::kCUDA), std::nullopt).storage().allocator();
  return found;
}

// Small results on the CPU come from malloc, which takes a tenth of the time of torch's allocator: the C library does not cache that
// allocator's aligned blocks.
constexpr size_t kSmallBytes = 32768;
inline at::Tensor allocate(Result const& r, c10::Device device) {
  const size_t bytes = span_bytes(r.sizes(), r.strides(), r.dtype);
  c10::Allocator* const allocator = device.is_cpu() ? c10::GetAllocator(c10::kCPU) : allocator_of_cuda();
  if (device.is_cuda() || bytes > kSmallBytes) return tensor_of(r, bytes, allocator->allocate(bytes), allocator);
  void* memory = std::malloc(bytes + c10::gAlignment);
  TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "no memory for a result of ", bytes, " bytes");
  void* data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory) + c10::gAlignment - 1) / c10::gAlignment * c10::gAlignment);
  return tensor_of(r, bytes, c10::DataPtr(data, memory, &std::free, c10::Device(c10::kCPU)), allocator);
}

}  // namespace gemmtune
