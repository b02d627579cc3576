"""Processes of untrusted GEMMs: this package is imported there by itself, without gemmtune."""
