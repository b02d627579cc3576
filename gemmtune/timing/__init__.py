"""Timing: samples of a kernel, rounds of contenders, and machine limits to compare them with."""
