"""The suite's own test: GEMMs that are broken on purpose, which it must reject, and right but unusual ones, which it must not.

    cd tests; gemmtune conformance mutants.sums:last_k_block_dropped

``table`` lists them all. ``gemm`` is a GEMM in plain torch whose steps can be exchanged; ``sums``, ``scalars``, ``reading`` and
``writing`` exchange them for wrong ones, ``right`` for right ones. ``triton_kernels`` has those that need a real kernel.
"""
