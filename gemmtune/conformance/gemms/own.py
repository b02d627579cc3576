"""Our own backends as GEMMs under test: ``gemmtune conformance own:triton``.

For each call one of the choices that the backend offers for the problem, and another one for another problem, so that a run goes
through many configs. The public operations, with tuning, are tested as ``gemmtune conformance gemmtune``. ``triton_sm80``,
``cutlass_sm75`` and the like are the kernels for an older architecture, whose PTX the driver translates for the GPU at hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib

import torch

from ... import settings
from ...architectures import how_to_run
from ...choice import Choice, Claims, Kernel
from ...declaration.labels import BIASES, NARROW_FLOATS, OPS, ROWS, SCALES, WEIGHTS
from ...declaration.subject import Call, Subject
from ...declaration.traits import Traits
from ...device import DeviceInfo, detect, preset
from ...problem import Problem
from ...problem.flags import precision_scope
from ...selector.offers import legal_offers, offers_for
from ...toolchain.compiled import CompiledChoice

MOST_KERNELS = 256
"""Kernels that are kept bound, for the cases that repeat a problem."""
EVERYTHING = Traits(
    ops=OPS,
    out=True,
    alpha=True,
    beta=True,
    bias=BIASES,
    scales=SCALES,
    scale_dtypes=NARROW_FLOATS,
    weights=tuple(WEIGHTS),
    zeros=True,
    float8_pairs=True,
    results=NARROW_FLOATS,
    streams=True,
    capturable=True,
    splits=64,
    flush_subnormals=False,
)


class BackendSubject(Subject):
    """The choices of one backend. A problem for which it has none is refused with the backend's own reasons.

    Of the operations that ``traits`` name it declares those that the backend has on the devices that are here, or with ``arch`` for
    that architecture, which is the GPU's own or an older one.
    """

    def __init__(self, backend: str, traits: Traits, arch: str | None = None) -> None:
        self.name = f"gemmtune backend {backend}" + (f" for {arch}" if arch else "")
        self.backend = backend
        # The settings of the process may allow choices that add up in the order of arrival.
        self._asked = dataclasses.replace(traits, deterministic=traits.deterministic and settings.current().deterministic)
        self.arch = arch
        self._bound = functools.lru_cache(MOST_KERNELS)(self._bind)

    @functools.cached_property
    def traits(self) -> Traits:  # type: ignore[override]
        """What it declares, found when asked for: all subjects are made when one of them is named."""
        here = [kind for kind in self._asked.devices if kind == "cpu" or torch.cuda.is_available()]
        devices = [preset(self.arch)] if self.arch else [detect(kind) for kind in here]
        had = tuple(op for op in self._asked.ops or () if any(self._has(op, device) for device in devices))
        return dataclasses.replace(self._asked, ops=had or self._asked.ops)  # without any, each call says why

    def _has(self, op: str, device: DeviceInfo) -> bool:
        """Whether it has a choice for a large product of this kind with aligned rows."""
        row, kind = ROWS[op], "cpu" if device.type == "cpu" else "cuda"
        make, sizes = getattr(Problem, row.name), (*(4,) * row.batched, 256, 256, 256)
        dtypes = [{}] if row.quantized else [{"dtype": torch.float16}, {"dtype": torch.float32}]
        chosen = dataclasses.replace(settings.current(), backends=(self.backend,), extra_choices=None, search="quick")
        problems = (given for dtype in dtypes for given in _ways(make(*sizes, device_type=kind, **dtype)))
        return any(legal_offers(problem, device, chosen, on_this_machine=False).choices for problem in problems)

    def __call__(self, call: Call) -> torch.Tensor:
        """Run the problem's choice, of a block-sparse weight that is prepacked anew where it takes no other.

        Raises:
            NotImplementedError: the backend has no choice, or the call is captured and its weight would be prepacked in it.
        """
        choice, kernel = self._bound(call.problem)
        if choice.problem == call.problem or choice.packed_format is None:
            return call.by(kernel)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(f"{choice.name} takes prepacked weights alone, and these are not prepacked in a capture")
        a, b, *others = call.tensors
        return dataclasses.replace(call, tensors=(a, choice.pack(b), *others)).by(kernel)

    def choice_of(self, call: Call) -> str:
        """The name of the problem's choice."""
        return self._bound(call.problem)[0].name

    def conditions(self, problem: Problem) -> contextlib.AbstractContextManager[None]:
        """All of torch's precision flags are those of the problem, as when it is tuned."""
        return precision_scope(problem)

    def claims(self, problem: Problem) -> Claims:
        """What the problem's choice claims."""
        try:
            return self.choice(problem).claims
        except NotImplementedError:
            return super().claims(problem)

    def choice(self, problem: Problem) -> Choice:
        """The choice for a problem: always the same one, chosen by the problem's key.

        Raises:
            NotImplementedError: the backend offers none; with its reasons.
        """
        device = preset(self.arch) if self.arch else detect(problem.device_type)
        chosen = dataclasses.replace(settings.current(), backends=(self.backend,), extra_choices=None)
        reasons: dict[str, None] = {}
        for given in _ways(problem):
            offers = offers_for(given, device, chosen)
            if offers.choices and not problem.empty and 0 not in problem.summed:
                return offers.choices[zlib.crc32(problem.key.encode()) % len(offers.choices)]
            reasons = dict.fromkeys(refusal.reason for refusal in offers.refusals)  # the last way's: it is refused least
        raise NotImplementedError(f"{self.backend} has no choice: {'; '.join(reasons) or 'an empty product is not its business'}")

    def _bind(self, problem: Problem) -> tuple[Choice, Kernel]:
        """The problem's choice with its kernel, of PTX for another architecture. Raises NotImplementedError where none runs."""
        choice = made = self.choice(problem)
        if self.arch is not None and isinstance(choice, CompiledChoice):
            way = how_to_run(self.arch, detect(choice.problem.device_type))
            if way.mode is None:
                raise NotImplementedError(f"{self.backend}: {way.reason}")
            made = choice.forward() if way.mode == "forward" else choice
        return choice, made.build()


def _ways(problem: Problem) -> tuple[Problem, ...]:
    """How a backend is asked for a problem: as it is, and of a block-sparse weight also with one that is prepacked."""
    return (problem,) if problem.sparsity is None else (problem, dataclasses.replace(problem, prepacked=True))


aten = BackendSubject("aten", EVERYTHING)
cublaslt = BackendSubject("cublaslt", dataclasses.replace(EVERYTHING, devices=("cuda",)))
triton = BackendSubject("triton", dataclasses.replace(EVERYTHING, deterministic=True))
_ON_CUDA = dataclasses.replace(EVERYTHING, devices=("cuda",), deterministic=True)
cutlass = BackendSubject("cutlass", _ON_CUDA)
cuda = BackendSubject("cuda", _ON_CUDA)
ck = BackendSubject("ck", _ON_CUDA)
triton_sm75, triton_sm80 = (BackendSubject("triton", _ON_CUDA, arch) for arch in ("sm75", "sm80"))
cutlass_sm75, cutlass_sm80 = (BackendSubject("cutlass", _ON_CUDA, arch) for arch in ("sm75", "sm80"))
cpp = BackendSubject(
    "cpp", dataclasses.replace(EVERYTHING, devices=("cpu",), streams=False, capturable=False, threads=True, deterministic=True)
)
