"""Decisions on attention of one query, by times of torch's operator and of our kernels in the store, or by a rule."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from ...choice import Status
from ...device import DeviceInfo
from ...passes import load
from ...store.key import fingerprint_text, now
from ...store.store import Row, Store
from ...timing.contenders import GraphContender
from ...timing.rounds import play, tie
from .attention import Attention, Config, example_numbers
from .planned_attention import OPERATOR, composition
from .report import Decision

log = logging.getLogger("gemmtune")

T = TypeVar("T")
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


def decide(attention: Attention, device: DeviceInfo, timing: str, store: Store, *, by_rule: bool) -> AttentionDecision:
    """Return the fastest config if it beats torch's operator by more than a tie. Without times the rule decides, if it applies."""
    rows = store.rows(attention.key, fingerprint_text(device, timing)).values()
    times = {row.name: row.time_us for row in rows if row.time_us is not None}
    torch_us = times.pop(TORCH, None)
    if torch_us is None:
        config = _verified(attention, device, attention.configs(device)[0]) if by_rule else None
        reason = "heads share keys: by rule, verified here, not measured" if config else "not tuned"
        return AttentionDecision(taken="alone" if config else "", reason=reason, config=config)
    configs = {str(config): config for config in attention.configs(device)}
    ours = min((name for name in times if name in configs), key=times.__getitem__, default=None)
    if ours is None:
        return AttentionDecision(taken="", reason="no kernel of ours ran", times_us=((TORCH, torch_us),))
    shown = ((TORCH, torch_us), ("alone", times[ours]))
    if times[ours] > (1 - tie()) * torch_us:
        return AttentionDecision(taken="", reason="torch's own is as fast", times_us=shown)
    reason = "faster than torch's own, and keys and values are not copied for the heads that share them"
    return AttentionDecision(taken="alone", reason=reason, times_us=shown, config=configs[ours])


def decide_for_any_batch(attention: Attention, device: DeviceInfo) -> AttentionDecision:
    """Return the decision that does not depend on the batch: one config, verified and not timed."""
    config = _verified(attention, device, attention.config_for_any_batch)
    reason = "batch_invariant: one division of the keys for any batch, verified here" if config else "batch_invariant: torch's"
    return AttentionDecision(taken="alone" if config else "", reason=reason, config=config)


def serves(device: DeviceInfo) -> bool:
    """Return True if the kernels run on the device: CUDA from sm80 on, for which Inductor needs Triton too."""
    return device.type == "cuda" and torch.version.hip is None and device.capability >= LEAST_CAPABILITY


def measure(attention: Attention, device: DeviceInfo, timing: str, store: Store) -> None:
    """Verify and time torch's operator and every config, unless the store has results."""
    key, fingerprint = attention.key, fingerprint_text(device, timing)
    if any(row.status is Status.OK for row in store.rows(key, fingerprint).values()):
        return
    common: dict[str, Any] = {"key": key, "fingerprint": fingerprint, "backend": BACKEND_NAME, "measured_at": now()}
    failures: dict[str, tuple[Status, str]] = {}
    try:
        times = _on_a_stream(device, attention, lambda first, stream: _times(device, first, stream, failures))
    except torch.OutOfMemoryError as error:  # of this moment: nothing is stored
        log.warning("%s: its attention was not measured: %s", key, error)
        return
    rows = [Row(name=x, content_hash=x, status=status, reason=why, **common) for x, (status, why) in failures.items()]
    rows += [Row(name=x, content_hash=x, status=Status.OK, time_us=us, finalist=True, **common) for x, us in times.items()]
    store.put(rows)


_verified_configs: dict[tuple[str, DeviceInfo, Config], bool] = {}


def _verified(attention: Attention, device: DeviceInfo, config: Config) -> Config | None:
    """Return the config if it is correct here. Each process verifies it once. Nothing is timed."""
    key = (attention.key, device, config)
    if key not in _verified_configs:
        try:
            status, _ = _on_a_stream(device, attention, lambda first, _: first.outcome(config))
        except torch.OutOfMemoryError:
            return None
        _verified_configs[key] = status is Status.OK
    return config if _verified_configs[key] else None


def _on_a_stream(device: DeviceInfo, attention: Attention, work: Callable[["_Operands", torch.cuda.Stream], T]) -> T:
    stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), torch.no_grad():
        return work(_Operands.of(attention), stream)


def _times(
    device: DeviceInfo, first: "_Operands", stream: torch.cuda.Stream, failures: dict[str, tuple[Status, str]]
) -> dict[str, float]:
    """Return the times of torch's operator and of the correct configs, and add the others to ``failures``."""
    attention = first.attention
    operands = [first, *(_Operands.of(attention) for _ in range(min(MOST_SETS, BYTES // first.nbytes) - 1))]
    calls: dict[str, list[Callable[[], object]]] = {TORCH: [x.torchs for x in operands]}
    for config in attention.configs(device):
        status, why = first.outcome(config)
        if status is Status.OK:
            calls[str(config)] = [functools.partial(x.ours, config) for x in operands]
        else:
            failures[str(config)] = status, why
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

    def outcome(self, config: Config) -> tuple[Status, str]:
        """Return whether our result is correct, and if not, why."""
        try:
            ratio = self.error_over_bound(config)
        except load("attention").OutOfResources as error:
            return Status.OUT_OF_RESOURCES, str(error)
        if ratio <= 1:  # false for NaN
            return Status.OK, ""
        return Status.WRONG_RESULT, f"got an error of {ratio:.3g} bounds, expected 1 or less"

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
    size, stride = example_numbers(value.shape), example_numbers(value.stride())
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return torch.randn(span, dtype=value.dtype, device=value.device).as_strided(size, stride)
