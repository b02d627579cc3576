"""Test operands, exact probes, reference values and error bounds: the means to judge a result."""
