"""The oracle: operands, exact probes, reference values, error bounds."""
