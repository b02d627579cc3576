"""Declarations of GEMMs, our own or foreign. The suite tests a GEMM by its declaration, and the selector offers it by the same."""
