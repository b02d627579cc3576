"""The performance gate: tests if a GEMM is slower than before, or than torch, by more than chance explains.

    gemmtune perf-gate 512x512x512 --dtype float32

A *candidate* is timed against a *reference*: torch, or the stored ratio to torch. ``statistics`` has the rule, ``sampling`` the
measurement in one process, ``collect`` the processes, and ``baselines`` the stored ratios. ``gate`` is the whole flow, and
``result`` the report.
"""
