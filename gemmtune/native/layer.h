// The forward of a layer, input @ weight.t() + bias, by the record kept for its operands: a launch of ours or torch's operation.
#pragma once
#include "table.h"

#include <ATen/ops/linear_ops.h>
#include <c10/util/strides.h>

namespace gemmtune {

constexpr uint64_t kLayer = uint64_t{1} << 63;  // set in the word that otherwise holds the operation's name

// cuStreamGetCaptureInfo_v2, at an address that Python found.
using CaptureInfo = int (*)(void* stream, int* state, uint64_t* number, void*, void*, void*);

// Store the input in the key as a matrix regardless of its dimensions, with M separate if there are several rows.
inline void count_as_matrix(Call& call) {
  const at::Tensor& a = *call.read[0];
  const int64_t k = a.size(-1), rows = a.numel() / k;
  uint64_t* words = call.key.words + call.at[0];
  const uint64_t matrix[] = {(words[0] & ~uint64_t{0xff}) | 2, rows > 1 ? kRows : 1, uint64_t(k), uint64_t(k), 1};
  std::copy(std::begin(matrix), std::end(matrix), words);
  call.key.count = call.at[0] + static_cast<int>(std::size(matrix));
  call.key.rows = rows > 1 ? rows : kEveryRows;
}

// Read the forward's operands in the order (input, weight, bias).
inline Reading read_layer(PyObject* input, PyObject* weight, PyObject* bias, Call& call) {
  const uint64_t token = plain_thread() ? settings_token() : 0;
  if (token == 0) return Reading::kUnusual;
  Key& key = call.key;
  key.add(kLayer);
  key.add(token);
  key.add(0);  // filled in below
  if (!add_operand(input, call, 0)) return Reading::kUnusual;
  const at::Tensor& a = *call.read[0];
  if (a.dim() < 2 || !a.is_contiguous()) return Reading::kUnusual;
  count_as_matrix(call);
  for (PyObject* one : {weight, bias}) {
    if (one != Py_None && !add_operand(one, call, call.count)) return Reading::kUnusual;
  }
  if (call.count < 2 || call.read[1]->dim() != 2) return Reading::kUnusual;
  if (a.dim() > 2 && call.count > 2 && call.read[2]->dim() > 1) return Reading::kUnusual;  // the rows of a batch do not have its shape
  const int64_t flags = a.is_cuda() ? device_flags(a) : 0;
  if (flags < 0) return Reading::kUnusual;
  key.words[2] = state_word(a, flags) | static_cast<uint64_t>(call.count) << 16;
  call.scalars[1] = call.count > 2 ? 1 : 0;
  call.following = call.count < 3 || call.read[2]->dim() == 1 ? 1 : 0;  // only the input has M rows
  return Reading::kRead;
}

// Return the form in which the layer returns a launch's result: dense, with the input's dimensions.
inline Result result_of_layer(Record const& record, Call const& call) {
  const auto sizes = call.read[0]->sizes();
  Result result;
  result.dtype = record.result.dtype;
  result.dims = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), result.size);
  result.size[result.dims - 1] = call.read[1]->size(0);
  result.stride[result.dims - 1] = 1;
  for (int i = result.dims - 1; i > 0; --i) result.stride[i - 1] = result.stride[i] * result.size[i];
  return result;
}

// Call torch's operation below autograd, which has no work here.
//
// Strides are those of with_usual_strides in problem/compositions.py: below autograd no weight needs a gradient.
inline at::Tensor layer_by_torch(Call const& call, std::optional<at::Tensor> const& bias) {
  at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor& x = *call.read[0];
  const auto usual = c10::contiguous_strides(x.sizes());
  return at::_ops::linear::call(x.strides() == c10::IntArrayRef(usual) ? x : x.as_strided(x.sizes(), usual), *call.read[1], bias);
}

// Return true if a CUDA graph captures the current stream, or if that is unknown.
inline bool captured(uint64_t capture_info, c10::Device device) {
  int state = 0;
  uint64_t number = 0;
  return reinterpret_cast<CaptureInfo>(capture_info)(stream_of(device), &state, &number, nullptr, nullptr, nullptr) != 0 || state != 0;
}

}  // namespace gemmtune
