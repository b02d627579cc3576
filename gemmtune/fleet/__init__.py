"""Tuning on many devices at once: the GPUs of a host, or those of a Ray cluster. Jobs are dealt by their expected time."""
