"""Decisions on attention of one query, by times of torch's operator and of our kernels in the store."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...choice import Status
from ...device import DeviceInfo
from ...passes import load
from ...store.key import fingerprint_text, now
from ...store.store import Row, Store
from ...timing.contenders import GraphContender
from ...timing.rounds import play, tie
from .attention import Attention, Config
from .planned_attention import OPERATOR, composition
from .report import Decision

BACKEND_NAME = "attention"
LEAST_CAPABILITY = 80
TORCH = "torch"
BUDGET_S, SAMPLE_US = 0.2, 300.0
BYTES = 1 << 28
"""Memory of the operands that one contender reads in turn: several times an L2."""
MOST_SETS = 16
BOUND = 4.0
"""Largest error, in units of the dtype's epsilon times the largest value: weights and result are rounded once each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionDecision(Decision):
    """The decision on attention of one query. ``config`` is that of the kernels that run, None if torch's operator stays."""

    config: Config | None = None


def decide(attention: Attention, device: DeviceInfo, timing: str, store: Store) -> AttentionDecision:
    """Return the fastest config if it beats torch's operator by more than a tie."""
    rows = store.rows(attention.key, fingerprint_text(device, timing)).values()
    times = {row.name: row.time_us for row in rows if row.time_us is not None}
    torch_us = times.pop(TORCH, None)
    if torch_us is None:
        return AttentionDecision(taken="", reason="not tuned")
    configs = {str(config): config for config in attention.configs(device)}
    ours = min((name for name in times if name in configs), key=times.__getitem__, default=None)
    if ours is None:
        return AttentionDecision(taken="", reason="no kernel of ours ran", times_us=((TORCH, torch_us),))
    shown = ((TORCH, torch_us), ("alone", times[ours]))
    if times[ours] > (1 - tie()) * torch_us:
        return AttentionDecision(taken="", reason="torch's own is as fast", times_us=shown)
    reason = "faster than torch's own, and keys and values are not copied for the heads that share them"
    return AttentionDecision(taken="alone", reason=reason, times_us=shown, config=configs[ours])


def serves(device: DeviceInfo) -> bool:
    """Return True if the kernels run on the device: CUDA from sm80 on, for which Inductor needs Triton too."""
    return device.type == "cuda" and torch.version.hip is None and device.capability >= LEAST_CAPABILITY


def measure(attention: Attention, device: DeviceInfo, timing: str, store: Store) -> None:
    """Verify and time torch's operator and every config, unless the store has results."""
    key, fingerprint = attention.key, fingerprint_text(device, timing)
    if store.rows(key, fingerprint):
        return
    common: dict[str, Any] = {"key": key, "fingerprint": fingerprint, "backend": BACKEND_NAME, "measured_at": now()}
    failures: dict[str, tuple[Status, str]] = {}
    try:
        times = _times(attention, device, failures)
    except torch.OutOfMemoryError as error:
        times, failures = {}, {TORCH: (Status.OUT_OF_RESOURCES, str(error))}
    rows = [Row(name=x, content_hash=x, status=status, reason=why, **common) for x, (status, why) in failures.items()]
    rows += [Row(name=x, content_hash=x, status=Status.OK, time_us=us, finalist=True, **common) for x, us in times.items()]
    store.put(rows)


def _times(attention: Attention, device: DeviceInfo, failures: dict[str, tuple[Status, str]]) -> dict[str, float]:
    """Return the times of torch's operator and of the correct configs, and add the others to ``failures``."""
    errors = load("attention").OutOfResources
    stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), torch.no_grad():
        first = _Operands.of(attention)
        operands = [first, *(_Operands.of(attention) for _ in range(min(MOST_SETS, BYTES // first.nbytes) - 1))]
        calls: dict[str, list[Callable[[], object]]] = {TORCH: [x.torchs for x in operands]}
        for config in attention.configs(device):
            try:
                ratio = first.error_over_bound(config)
            except errors as error:
                failures[str(config)] = (Status.OUT_OF_RESOURCES, str(error))
                continue
            if ratio <= 1:  # false for NaN
                calls[str(config)] = [functools.partial(x.ours, config) for x in operands]
            else:
                failures[str(config)] = (Status.WRONG_RESULT, f"got an error of {ratio:.3g} bounds, expected 1 or less")
        contenders = {name: GraphContender(found, stream, sample_us=SAMPLE_US) for name, found in calls.items()}
        return {name: ranked.time_us for name, ranked in play(contenders, budget_s=BUDGET_S, keep=(TORCH,)).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operands:
    """Random operands of attention, for torch's operator with its other arguments, and for ours."""

    attention: Attention
    torchs: Callable[[], object]
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, attention: Attention) -> "_Operands":
        """Make the operands. Those that both read are the same."""
        made = {x: _example(x.meta["val"]) for x in dict.fromkeys((*attention.node.all_input_nodes, *attention.tensors))}
        node = attention.node
        args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        call = functools.partial(node.target, *args, **kwargs)  # type: ignore[operator, arg-type, misc]
        return cls(attention=attention, torchs=call, tensors=tuple(made[x] for x in attention.tensors))

    @property
    def nbytes(self) -> int:
        """Bytes that ours reads."""
        return sum(x.nbytes for x in self.tensors)

    def ours(self, config: Config) -> torch.Tensor:
        """Return our result."""
        numbers = {"splits": config.splits, "block": config.block, "warps": config.warps}
        return OPERATOR(list(self.tensors), scale=self.attention.scale, **numbers)  # type: ignore[no-any-return]

    def error_over_bound(self, config: Config) -> float:
        """Return the largest error of our result, divided by its bound."""
        expected = composition(*self.tensors, scale=self.attention.scale)
        bound = BOUND * torch.finfo(self.tensors[0].dtype).eps * float(self.tensors[2].abs().max())
        return float((self.ours(config).float() - expected).abs().max()) / bound


def _example(value: torch.Tensor) -> torch.Tensor:
    """Return random numbers in the layout of a tensor of the graph."""
    span = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return torch.randn(span, dtype=value.dtype, device=value.device).as_strided(value.shape, value.stride())
