"""Processes of untrusted GEMMs. They import this package alone, without gemmtune."""
