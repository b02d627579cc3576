"""The checks, by what they look at. Each module has a tuple ``PROPERTIES``."""
