"""Cases: values that say what is asked of a GEMM, and which of them a run consists of."""
