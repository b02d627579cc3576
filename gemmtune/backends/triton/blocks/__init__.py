"""Block-sparse weights: kernels walk panels of rows and read and multiply only the stored blocks."""
