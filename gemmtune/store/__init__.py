"""Stored measurements: rows by problem, machine and choice, in an SQLite file that is a cache and never a dependency."""
