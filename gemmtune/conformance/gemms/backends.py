"""Our own backends as GEMMs under test: ``gemmtune conformance backend:triton``.

Each call runs one of the choices that the backend offers for the problem. Another problem gets another choice, so a run goes
through many configs. ``gemmtune conformance gemmtune`` tests the public operations, with tuning. ``triton_sm80``,
``cutlass_sm75`` and the like are the kernels for an older architecture, whose PTX the driver translates for the present GPU.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Iterator

import torch

from ... import settings
from ...architectures import how_to_run
from ...choice import Choice, Claims, Kernel
from ...declaration.labels import BIASES, GATES, INDEX_DTYPES, NARROW_FLOATS, OPS, SCALES, WEIGHTS, plain_scales
from ...declaration.subject import Call, Subject
from ...declaration.traits import Traits
from ...device import DeviceInfo, detect, preset
from ...problem import Problem
from ...selector.offers import legal_offers, offers_for
from ...toolchain.compiled import CompiledChoice
from ..cases.case import Case
from ..cases.forms import forms_of
from ..cases.scope import Scope
from ..cases.statement import problem_of

MOST_KERNELS = 256
"""Kernels kept bound, for cases that repeat a problem."""
EVERYTHING = Traits(
    ops=OPS, out=True, alpha=True, beta=True, bias=BIASES, scales=SCALES, scale_dtypes=NARROW_FLOATS, weights=tuple(WEIGHTS),
    zeros=True, float8_pairs=True, results=NARROW_FLOATS, gates=GATES, index_dtypes=INDEX_DTYPES,
    streams=True, capturable=True, splits=64, flush_subnormals=False,
)  # fmt: skip


class BackendSubject(Subject):
    """Choices of one backend as a GEMM. A problem without a choice is refused with the backend's own reasons.

    It declares the operations of ``traits`` that the backend supports on the present devices. With ``arch``, it declares the
    operations for that architecture, which is the GPU's own or an older one.
    """

    def __init__(self, backend: str, traits: Traits, arch: str | None = None) -> None:
        self.name = f"gemmtune backend {backend}" + (f" for {arch}" if arch else "")
        self.backend = backend
        # The settings of the process may allow choices that add in the order of arrival.
        self._requested = dataclasses.replace(traits, deterministic=traits.deterministic and settings.current().deterministic)
        self.arch = arch
        self._bound = functools.lru_cache(MOST_KERNELS)(self._bind)

    @functools.cached_property
    def traits(self) -> Traits:  # type: ignore[override]
        """Declared traits, computed on first use: naming one subject constructs all of them."""
        here = [kind for kind in self._requested.devices if kind == "cpu" or torch.cuda.is_available()]
        devices = [preset(self.arch)] if self.arch else [detect(kind) for kind in here]
        had = tuple(op for op in self._requested.ops or () if any(self._has(op, device) for device in devices))
        return dataclasses.replace(self._requested, ops=had or self._requested.ops)  # else each call gives the reason

    def _has(self, op: str, device: DeviceInfo) -> bool:
        """Return True if there is a choice for a large product of this kind with aligned rows."""
        kind = "cpu" if device.type == "cpu" else "cuda"
        chosen = dataclasses.replace(settings.current(), backends=(self.backend,), extra_choices=None, search="quick")
        problems = (given for problem in _large(op, self._requested, kind) for given in _ways(problem))
        return any(legal_offers(problem, device, chosen, on_this_machine=False).choices for problem in problems)

    def __call__(self, call: Call) -> torch.Tensor:
        """Run the problem's choice. A block-sparse weight is prepacked at each call if the choice takes only prepacked ones.

        Raises NotImplementedError without a choice, and for a captured call that would prepack its weight.
        """
        choice, kernel = self._bound(call.problem)
        if choice.problem == call.problem or choice.packed_format is None:
            return call.by(kernel)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(f"{choice.name} takes only prepacked weights, and a weight cannot be prepacked in a capture")
        a, b, *others = call.tensors
        return dataclasses.replace(call, tensors=(a, choice.pack(b), *others)).by(kernel)

    def choice_of(self, call: Call) -> str:
        return self._bound(call.problem)[0].name

    def claims(self, problem: Problem) -> Claims:
        try:
            return self.choice(problem).claims
        except NotImplementedError:
            return super().claims(problem)

    def choice(self, problem: Problem) -> Choice:
        """Return the problem's choice, selected by its key. Raises NotImplementedError with the backend's reasons without one."""
        device = preset(self.arch) if self.arch else detect(problem.device_type)
        chosen = dataclasses.replace(settings.current(), backends=(self.backend,), extra_choices=None)
        reasons: dict[str, None] = {}
        for given in _ways(problem):
            offers = offers_for(given, device, chosen)
            if offers.choices and not problem.empty and 0 not in problem.summed:
                return offers.choices[zlib.crc32(problem.key.encode()) % len(offers.choices)]
            reasons = dict.fromkeys(refusal.reason for refusal in offers.refusals)  # keep the last form's: it has fewest refusals
        raise NotImplementedError(f"{self.backend} has no choice: {'; '.join(reasons) or 'the product is empty'}")

    def _bind(self, problem: Problem) -> tuple[Choice, Kernel]:
        """Return the choice and its kernel, from PTX for an older GPU. Raises NotImplementedError if the kernel cannot run here."""
        choice = made = self.choice(problem)
        if self.arch is not None and isinstance(choice, CompiledChoice):
            way = how_to_run(self.arch, detect(choice.problem.device_type))
            if way.mode is None:
                raise NotImplementedError(f"{self.backend}: {way.reason}")
            made = choice.forward() if way.mode == "forward" else choice
        return choice, made.build()


def _large(op: str, traits: Traits, device_type: str) -> Iterator[Problem]:
    """Yield large aligned problems of an operation in each declared dtype and form, with weights as nn.Linear stores them first."""
    scope = Scope(traits=traits, device_type=device_type)
    plain = Case(property_name="offers", op=op, m=256, n=256, k=256, scales=plain_scales(op))
    for a, b in (("row", "row"),) if plain.row.sparse else (("row", "col"), ("col", "row")):
        for dtype, form in itertools.product(scope.tested_dtypes(op), forms_of(op, traits)):
            fields = form.fields(dtype, plain.m)
            case = plain.changed(dtype=dtype, a=a, b=b, batch=4 if plain.batched else 1, **fields)
            yield problem_of(case, device_type)


def _ways(problem: Problem) -> tuple[Problem, ...]:
    """Return the problem in each form that a backend may support: as it is, and with a block-sparse weight prepacked."""
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
BACKENDS = {name: value for name, value in globals().items() if isinstance(value, BackendSubject)}
"""GEMMs under test by the name after ``backend:``."""
