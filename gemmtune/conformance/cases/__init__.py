"""Cases: values that specify one call of a GEMM, and the enumeration of the cases of a run."""
