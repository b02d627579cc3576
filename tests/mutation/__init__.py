"""Whether the tests notice small edits of the package: see run.py."""
