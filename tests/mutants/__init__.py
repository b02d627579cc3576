"""Tests of the suite itself: GEMMs broken on purpose, which it must reject, and right but unusual ones, which it must accept.

    cd tests; gemmtune conformance mutants.sums:last_k_block_dropped

``table`` lists them all. ``gemm`` is a GEMM in plain torch with replaceable steps. ``sums``, ``scalars``, ``reading`` and
``writing`` replace them by wrong ones, ``right`` by right ones. ``triton_kernels`` has the mutants that need a real kernel.
"""
