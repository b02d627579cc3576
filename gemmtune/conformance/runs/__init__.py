"""Runs: the cases of a run, the processes that judge them, and files that it reads and writes."""
