"""Choice of a CK instance that is specialised for a problem."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...cache import cache_dir
from ...choice import Claims, Kernel
from ...device import DeviceInfo
from ...errors import ErrorFromChoice, UnavailableError
from ...problem.dtypes import dtype_info
from ...toolchain.codeobject import assembly_text, find_hip_compiler, make_code_object
from ...toolchain.compiled import Artifact, FileChoice, amdgcn_usage
from ...toolchain.hip import HipLauncher, LoadedHipKernel, find_hip, loaded_hip_kernel
from ...toolchain.launcher import bind
from ...toolchain.record import Record
from .configs import Config
from .legality import Predicate
from .products import MFMA_K, Element
from .source import KernelSource, record_of, source_of
from .toolkit import find_toolkit

NAME = "ck"
FLUSHING = "gfx90a"
"""Architecture whose 16-bit matrix instructions flush subnormal numbers to zero (PyTorch notes, "Numerical accuracy")."""


def name_of(predicate: Predicate, config: Config) -> str:
    dtypes = dict.fromkeys(dtype_info(x.dtype).short for x in (predicate.problem.a, predicate.problem.b))
    return f"{NAME}:xdl_{'_'.join(dtypes)}_{config.label}"


@dataclass(frozen=True, kw_only=True)
class CkChoice(FileChoice):
    """One instance, compiled for ``device``. ``checkout`` is the setting ``ck_dir``."""

    config: Config = field(repr=False)
    device: DeviceInfo = field(repr=False)
    checkout: str | None = field(repr=False)

    @classmethod
    def of(cls, config: Config, predicate: Predicate, checkout: str | None) -> "CkChoice":
        problem, device, instance = predicate.problem, predicate.device, config.instance
        flushes = device.arch == FLUSHING and problem.dtype in (torch.float16, torch.bfloat16)
        tile = f"{instance.block_m}x{instance.block_n}x{instance.block_k(config.itemsize)}"
        info: dict[str, Any] = {
            "tile": tile, "waves": instance.waves, "mfma": instance.mfma, "schedule": f"{instance.version}_{instance.scheduler}",
            "padding": config.padding, "split_k": config.split_k, "swap_ab": config.swap_ab, "lds_bytes": config.lds_bytes,
            "run": "never: compiled and inspected alone",
        }  # fmt: skip
        return cls(
            name=name_of(predicate, config),
            backend=NAME,
            problem=problem,
            claims=Claims(accumulate=torch.float32, flush_subnormals=flushes, splits=config.split_k),
            info=info,
            config=config,
            device=device,
            checkout=checkout,
        )

    def compiler(self) -> object:
        return find_hip_compiler(), find_toolkit(self.checkout)

    @functools.cached_property
    def predicate(self) -> Predicate:
        return Predicate(self.problem, self.device)

    @functools.cached_property
    def source(self) -> KernelSource:
        return source_of(self.predicate, self.config, self.checkout or "")

    @functools.cached_property
    def record(self) -> Record:
        return record_of(self.predicate, self.config)

    @property
    def file(self) -> tuple[str, ...]:
        return NAME, f"{self.source.digest}.hsaco"

    def make(self) -> Path:
        def includes() -> tuple[Path, ...]:
            return find_toolkit(self.checkout).includes(cache_dir(NAME))

        return make_code_object(self.file, lambda: self.source.text, self.arch, includes, self.name)

    def load(self) -> LoadedHipKernel:
        """Load the kernel on the current device. Raises the errors of ``opened``, or UnavailableError if HIP cannot load it."""
        hip, device = find_hip(), torch.cuda.current_device()
        return self.opened(lambda path: loaded_hip_kernel(hip, path, self.record.kernel, device))

    def bind(self, loaded: LoadedHipKernel) -> Kernel:
        launcher = HipLauncher(loaded, self.record, lambda reason: ErrorFromChoice(self.name, str(self.problem), reason))
        return Kernel(run=bind(launcher, self.problem, self.name))

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:  # noqa: ARG002 - enumeration checked its facts
        text = self.opened(assembly_text)
        usage = amdgcn_usage(text)
        artifact = Artifact(
            kernel=self.record.kernel,
            threads=self.record.threads,
            shared_bytes=usage.shared_bytes,
            registers=usage.registers,
            stack_bytes=usage.stack_bytes,
            code=text,
            spilled_share=usage.spilled_share,
            expected=instruction(self.predicate.product.element, self.config.instance.mfma, self.arch),
            predicted_bytes=self.config.lds_bytes,
            slack_bytes=0,
        )
        return (artifact,)

    @property
    def arch(self) -> str:
        return self.device.arch

    def forward(self) -> "CkChoice":
        """Raise UnavailableError: a code object serves only its own architecture."""
        raise UnavailableError(f"{self.name}: got another GPU, expected {self.arch}: a code object serves one architecture")


def instruction(element: Element, mfma: int, arch: str) -> str:
    """Return the matrix instruction. ``*`` stands for the spelling of bfloat16, and for accumulation registers as operands."""
    depth = str(MFMA_K[arch][element][0 if mfma == 32 else 1])
    operands = {"f8": "fp8_fp8", "bf8": "bf8_bf8"}.get(element, element)
    # CDNA 2 writes v_mfma_f32_16x16x16f16, CDNA 3 v_mfma_f32_16x16x16_f16.
    return f"v_mfma_f32_{mfma}x{mfma}x{depth[:-1]}*[{depth[-1]}_]{operands}*"
