"""Runs: which cases a run consists of, the processes in which they are judged, and the records of what was found."""
