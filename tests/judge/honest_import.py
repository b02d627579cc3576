"""An honest GEMM whose import starts a compiler."""

import ctypes
import os
import subprocess
import tempfile

import torch

SOURCE = """
#include <omp.h>
#include <stdint.h>
void mm(const float* a, const float* b, float* out, int64_t m, int64_t n, int64_t k) {
  #pragma omp parallel for
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) out[i * n + j] = 0;
    for (int64_t l = 0; l < k; ++l)
      for (int64_t j = 0; j < n; ++j) out[i * n + j] += a[i * k + l] * b[l * n + j];
  }
}
"""
built = os.path.join(tempfile.mkdtemp(), "mm.so")
command = ["gcc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-x", "c", "-", "-o", built]
subprocess.run(command, input=SOURCE.encode(), check=True)
openmp = ctypes.CDLL(built)


def compiled_at_import(a, b):
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty(a.shape[0], b.shape[1])
    sizes = [ctypes.c_int64(size) for size in (a.shape[0], b.shape[1], a.shape[1])]
    openmp.mm(*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, out)), *sizes)
    return out


compiled_at_import.gemm_traits = {"dtypes": ["float32"], "ops": ["mm"]}
