"""Processes that verify and measure choices, so that a crash, a hang or an illegal access costs one choice."""
