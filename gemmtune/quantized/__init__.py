"""Quantized weights: ``QuantizedWeight``, its parts, its rounding, and the functions of torch that it supports."""
