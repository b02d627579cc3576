"""The performance gate: is a GEMM slower than it was, or than torch, by more than chance explains?

    gemmtune perf-gate 512x512x512 --dtype float32

``statistics`` is the rule, ``sampling`` what one process measures, ``processes`` where it is measured, ``collect`` how many
processes it takes, ``baselines`` what is remembered, ``gate`` all of it together, ``report`` how it is told.
"""
