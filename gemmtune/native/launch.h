// Launches as plain data, and how they are done: C functions of the cpp backend, kernels through the driver, torch's own operations.
#pragma once
#include "key.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mm_ops.h>

#include <cstdlib>
#include <utility>
#include <vector>

namespace gemmtune {

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
inline int launch(HostFunction const& f, void* out, void const* const* read, int count, double const* scalars) {
  void const *a = read[f.swapped ? 1 : 0], *b = read[f.swapped ? 0 : 1];
  if (f.plain) {
    using Product = int (*)(void const*, void*, void const*, void const*, int);
    return reinterpret_cast<Product>(f.function)(f.plan, out, a, b, at::get_num_threads());
  }
  void const* inp = f.added ? read[2] : nullptr;
  void const* const* more = read + (f.added ? 3 : 2);
  switch (count - (f.added ? 3 : 2)) {
    case 0: return call_gemm(f, out, a, b, inp, scalars, more, std::make_index_sequence<0>());
    case 1: return call_gemm(f, out, a, b, inp, scalars, more, std::make_index_sequence<1>());
    case 2: return call_gemm(f, out, a, b, inp, scalars, more, std::make_index_sequence<2>());
    case 3: return call_gemm(f, out, a, b, inp, scalars, more, std::make_index_sequence<3>());
    case 4: return call_gemm(f, out, a, b, inp, scalars, more, std::make_index_sequence<4>());
    case 5: return call_gemm(f, out, a, b, inp, scalars, more, std::make_index_sequence<5>());
    case 6: return call_gemm(f, out, a, b, inp, scalars, more, std::make_index_sequence<6>());
    default: return 1;
  }
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
constexpr size_t kMapBytes = 128, kMostParameterBytes = 4096;
constexpr int kMostParameters = 64;

struct TensorMap {
  int operand, data_type, swizzle, promotion, rank;
  uint64_t sizes[5], pitches[5];
  uint32_t box[5];
};
struct Place { uint32_t offset; int operand; int64_t more_bytes; };      // an operand's address
struct Number { uint32_t offset; int number; };                          // a scalar as float32
struct Aligned { uint32_t offset; int operand; uint64_t multiple_bytes; };
struct Multiple { int operand; uint64_t bytes; };

// A toolchain.record.Record, and the kernel that is loaded for it.
struct DriverLaunch {
  using LaunchKernel = int (*)(LaunchConfig const*, void*, void**, void**);
  using SetContext = int (*)(void*);
  using EncodeMap = int (*)(void*, int, uint32_t, void*, uint64_t const*, uint64_t const*, uint32_t const*, uint32_t const*, int, int, int, int);
  LaunchKernel launch_kernel = nullptr;
  SetContext set_context = nullptr;
  EncodeMap encode_map = nullptr;
  void *function = nullptr, *context = nullptr;
  unsigned grid[3] = {}, cluster = 0, threads = 0, shared_bytes = 0;
  bool pdl = false;
  int skipped = -1;  // the place of a tensor that the kernel is not told of
  std::vector<char> parameters;
  std::vector<uint32_t> arguments;
  std::vector<TensorMap> maps;
  std::vector<Place> places;
  std::vector<Number> numbers;
  std::vector<Aligned> aligned;
  std::vector<Multiple> multiples;
};

// A CUresult; -1 where an operand is not aligned as planned.
inline int launch(DriverLaunch const& d, void* out, void const* const* read, int count, double const* scalars, void* stream) {
  uint64_t addresses[kMostTensors + 2] = {reinterpret_cast<uint64_t>(out), 0};
  int known = 2;
  for (int i = 0; i < count; ++i) {
    if (i != d.skipped) addresses[known++] = reinterpret_cast<uint64_t>(read[i]);
  }
  for (auto const& m : d.multiples) {
    if (addresses[m.operand] % m.bytes) return -1;
  }
  alignas(64) char block[kMostParameterBytes];
  std::memcpy(block, d.parameters.data(), d.parameters.size());
  static const uint32_t ones[5] = {1, 1, 1, 1, 1};
  for (size_t i = 0; i < d.maps.size(); ++i) {
    TensorMap const& m = d.maps[i];
    const int status = d.encode_map(block + i * kMapBytes, m.data_type, m.rank, reinterpret_cast<void*>(addresses[m.operand]), m.sizes,
                                    m.pitches, m.box, ones, 0, m.swizzle, m.promotion, 0);
    if (status != 0) return status;
  }
  for (auto const& p : d.places) {
    const uint64_t address = addresses[p.operand] + p.more_bytes;
    std::memcpy(block + p.offset, &address, sizeof address);
  }
  for (auto const& n : d.numbers) {
    const float value = static_cast<float>(scalars[n.number]);
    std::memcpy(block + n.offset, &value, sizeof value);
  }
  for (auto const& flag : d.aligned) {
    if (addresses[flag.operand] % flag.multiple_bytes) block[flag.offset] = 0;
  }
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

// ---- torch's own operations, entered below autograd -----------------------------------------------------------------------------

enum class Operation : int { kMm, kBmm, kAddmm, kBaddbmm };
enum class Added : int { kAsGiven, kVector, kMatrix };
struct TorchOperation {
  Operation operation = Operation::kMm;
  Added added = Added::kAsGiven;
};

// inp as the operation gets it.
inline at::Tensor added(TorchOperation const& t, at::Tensor const* const* read) {
  at::Tensor const& inp = *read[2];
  if (t.added == Added::kMatrix) return inp.expand({read[0]->size(0), read[1]->size(1)});
  return t.added == Added::kVector && inp.dim() == 2 ? inp.select(0, 0) : inp;
}

// On a GPU, into a result that torch allocates.
inline at::Tensor launch(TorchOperation const& t, at::Tensor const* const* read, double const* scalars) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor const &a = *read[0], &b = *read[1];
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  switch (t.operation) {
    case Operation::kMm: return at::_ops::mm::redispatch(keys, a, b);
    case Operation::kBmm: return at::_ops::bmm::redispatch(keys, a, b);
    case Operation::kAddmm: return at::_ops::addmm::redispatch(keys, added(t, read), a, b, scalars[1], scalars[0]);
    default: return at::_ops::baddbmm::redispatch(keys, *read[2], a, b, scalars[1], scalars[0]);
  }
}

inline void launch_into(TorchOperation const& t, at::Tensor& out, at::Tensor const* const* read, double const* scalars) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor const &a = *read[0], &b = *read[1];
  const bool cpu = a.is_cpu();
  const c10::DispatchKeySet keys(cpu ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  switch (t.operation) {
    case Operation::kMm: cpu ? at::cpu::mm_out(out, a, b) : at::_ops::mm_out::redispatch(keys, a, b, out); break;
    case Operation::kBmm: cpu ? at::cpu::bmm_out(out, a, b) : at::_ops::bmm_out::redispatch(keys, a, b, out); break;
    case Operation::kAddmm: {
      const at::Tensor inp = added(t, read);
      cpu ? at::cpu::addmm_out(out, inp, a, b, scalars[1], scalars[0])
          : at::_ops::addmm_out::redispatch(keys, inp, a, b, scalars[1], scalars[0], out);
      break;
    }
    default:
      cpu ? at::cpu::baddbmm_out(out, *read[2], a, b, scalars[1], scalars[0])
          : at::_ops::baddbmm_out::redispatch(keys, *read[2], a, b, scalars[1], scalars[0], out);
  }
}

// ---- results and streams --------------------------------------------------------------------------------------------------------

struct Result {
  std::vector<int64_t> size, stride;
  at::ScalarType dtype = at::kFloat;
  size_t bytes = 0;
};

// A small result on the CPU. malloc takes a tenth of the time of torch's allocator, whose aligned blocks the C library does not keep.
constexpr size_t kSmallBytes = 32768;
inline at::Tensor allocate_small(Result const& r) {
  void* memory = std::malloc(r.bytes + c10::gAlignment);
  TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "no memory for a result of ", r.bytes, " bytes");
  void* data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory) + c10::gAlignment - 1) / c10::gAlignment * c10::gAlignment);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), r.bytes, c10::DataPtr(data, memory, &std::free, c10::Device(c10::kCPU)),
      c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  at::Tensor made = at::detail::make_tensor_base<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                                  c10::scalarTypeToTypeMeta(r.dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(r.size, r.stride);
  return made;
}

inline at::Tensor allocate(Result const& r, c10::Device device) {
  if (device.is_cpu() && r.bytes <= kSmallBytes) return allocate_small(r);
  if (device.is_cpu()) return at::Tensor(at::detail::empty_strided_cpu(r.size, r.stride, r.dtype));
  return at::_ops::empty_strided::redispatch(c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::fromIntArrayRefKnownNonNegative(r.size),
                                             c10::fromIntArrayRefKnownNonNegative(r.stride), r.dtype, std::nullopt, device, std::nullopt);
}

inline void* stream_of(c10::Device device) {
  return device.is_cpu() ? nullptr : c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device).native_handle();
}

}  // namespace gemmtune
