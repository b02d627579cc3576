"""Few rows times weights of four or eight bits, which are widened in registers and multiplied by single warps."""
