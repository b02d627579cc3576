"""Tuning ahead of calls: ``tune``, ``explain`` and ``multi``."""
