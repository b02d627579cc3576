// out[M, N] = a[M, K] @ b[K, N] in float32. Rows of out are contiguous, a and b have any strides, in elements.
//
// b is read in panels of BLOCK_N columns that are copied once for all rows, so that both layouts of a weight are read along memory
// once, and the inner loop goes over contiguous columns. Every element is one sum in the order of K: equal inputs give equal bits.

#include <algorithm>
#include <vector>

namespace {

constexpr long BLOCK_M = 4, BLOCK_N = 32;

void rows_by_panel(long rows, long cols, long k, const float* a, long am, long ak, const float* panel, float* out, long ldo) {
  float sums[BLOCK_M][BLOCK_N] = {};
  for (long p = 0; p < k; ++p)
    for (long i = 0; i < BLOCK_M; ++i) {
      const float left = i < rows ? a[i * am + p * ak] : 0.0f;
      for (long j = 0; j < BLOCK_N; ++j) sums[i][j] += left * panel[p * BLOCK_N + j];
    }
  for (long i = 0; i < rows; ++i) std::copy_n(sums[i], cols, out + i * ldo);
}

}  // namespace

extern "C" void own_kernels_product(long m, long n, long k, const float* a, long am, long ak, const float* b, long bk, long bn,
                                    float* out, long ldo) {
  std::vector<float> panel(static_cast<size_t>(k * BLOCK_N));
  for (long j0 = 0; j0 < n; j0 += BLOCK_N) {
    const long cols = std::min(BLOCK_N, n - j0);
    for (long p = 0; p < k; ++p)
      for (long j = 0; j < BLOCK_N; ++j) panel[p * BLOCK_N + j] = j < cols ? b[p * bk + (j0 + j) * bn] : 0.0f;
    for (long i0 = 0; i0 < m; i0 += BLOCK_M)
      rows_by_panel(std::min(BLOCK_M, m - i0), cols, k, a + i0 * am, am, ak, panel.data(), out + i0 * ldo + j0, ldo);
  }
}
