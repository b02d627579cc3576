"""Few rows times few columns, with K in one run: single warps multiply tiles of 16 columns."""
