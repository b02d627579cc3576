"""Grouped products: groups of rows, each with a matrix of its own, and groups of terms."""
