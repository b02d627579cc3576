"""The version, in a file of its own so that building the package imports nothing."""

__version__ = "0.1.0"
