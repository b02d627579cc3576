"""Calls of a GEMM that nobody vouches for, in a process of its own, by memory that the caller owns."""
