"""Tables that were made in the background, until a layer's call takes them over."""

import threading

import torch

from ..device import DeviceInfo
from ..dispatch.ranges import range_plan_for
from ..dispatch.ready import forget_plans
from ..problem.rows import RowClass
from ..settings import Settings

Made = tuple[RowClass, DeviceInfo, Settings]
"""A table: its class, and the device and the settings for which it was made."""


class Swaps:
    """Tables that no call uses yet. ``pending`` is True if there are any."""

    __slots__ = ("_lock", "_made", "pending")

    def __init__(self) -> None:
        self.pending = False
        self._made: list[Made] = []
        self._lock = threading.Lock()

    def add(self, made: Made) -> None:
        """Keep a table for the next call of a layer. Any thread may do this: no plan changes here."""
        with self._lock:
            self._made.append(made)
            self.pending = True

    def apply(self) -> None:
        """Drop all plans, and load the kernels of the new tables. During the capture of a CUDA graph, do it at a later call."""
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if started and torch.cuda.is_current_stream_capturing():
            return
        with self._lock:
            made, self._made = self._made, []
            self.pending = False
        if made:
            forget_plans()
        for rows_class, device, settings in made:
            shared = range_plan_for(rows_class.problem, device, settings)
            if shared is not None:
                shared.load()

    def forget(self) -> None:
        """Drop everything in a fork of this process, whose parent's threads do not run."""
        self._lock = threading.Lock()
        self._made, self.pending = [], False


swaps = Swaps()
"""Tables of this process."""
