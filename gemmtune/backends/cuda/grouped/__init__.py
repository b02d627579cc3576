"""Grouped products: groups of rows with one weight matrix each, and groups of terms of K."""
