"""Memory that launches on a stream keep from one to the next."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..threads import in_a_thread

T = TypeVar("T")


def kept(make: Callable[[], T], device: int, stream: int) -> T:
    """Return the tensors that ``make`` allocates on a stream. They outlive every CUDA graph.

    While Inductor warms up a graph, its thread allocates from the graph's pool, in which nothing may remain. So a new thread does
    it.
    """

    def made() -> T:
        with torch.cuda.stream(_stream_of(stream, device)):
            return make()

    return in_a_thread(made)


def _stream_of(handle: int, device: int) -> torch.cuda.Stream:
    """Return torch's stream with that handle. The default stream's is 0, for which ``ExternalStream`` makes a new stream."""
    if not handle:
        return torch.cuda.default_stream(device)
    found: torch.cuda.Stream = torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]
    return found


_MANAGERS = "tree_manager_containers"
"""Name under which Inductor keeps its trees of graphs for a thread and those that torch's autograd starts for it."""


def is_ordered(stream: int, device: int) -> bool:
    """Return True for the stream on which Inductor captures its trees of graphs, which never run concurrently.

    Captures there use the stream's own memory, because nothing may remain in the pool of such a graph.
    """
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch._C._is_key_in_tls(_MANAGERS):
        return False
    manager = trees.get_manager(device, create_if_none_exists=False)
    return manager is not None and bool(manager.stream.cuda_stream == stream)
