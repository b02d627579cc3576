"""What the kernels for mixed_mm have in common: weights of four or eight bits, which are read as they lie in memory."""
