"""Extension points of SGLang that the plugin needs, looked up by name, since another version may lack some."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from ..serving.start import Finder, Missing

QUANTIZATION = "sglang.srt.layers.quantization"
DENSE = f"{QUANTIZATION}.unquant.UnquantizedLinearMethod"
"""The linear method of weights that are not quantized."""
EXPERTS = f"{QUANTIZATION}.unquant.UnquantizedFusedMoEMethod"
"""The method of experts that are not quantized."""
COMBINED = "sglang.srt.layers.moe.token_dispatcher.StandardCombineInput"
"""SGLang's record of a result of experts."""
MIXED = (
    f"{QUANTIZATION}.gptq.GPTQMarlinLinearMethod",
    f"{QUANTIZATION}.awq.AWQLinearMethod",
    f"{QUANTIZATION}.compressed_tensors.compressed_tensors.CompressedTensorsLinearMethod",
)
"""Linear methods of weights of 4 or 8 bits with inputs of 16. The last one also has layers of float8 and int8."""
SCALED = (
    f"{QUANTIZATION}.fp8.Fp8LinearMethod",
    f"{QUANTIZATION}.modelopt_quant.ModelOptFp8LinearMethod",
    f"{QUANTIZATION}.w8a8_fp8.W8A8Fp8LinearMethod",
    f"{QUANTIZATION}.w8a8_int8.W8A8Int8LinearMethod",
)
"""Linear methods of float8 and int8, which call one of PRODUCTS."""
PRODUCTS = (f"{QUANTIZATION}.fp8_utils.fp8_scaled_mm", f"{QUANTIZATION}.w8a8_int8.int8_scaled_mm")
"""Functions for products of inputs that are rounded by rows."""
FUNCTIONS = {"apply": ("self", "layer", "x", "bias"), "process_weights_after_loading": ("self", "layer")}
"""Parameters of the functions of a linear method, which the plugin passes on by place."""
OF_EXPERTS = FUNCTIONS | {"apply": ("self", "layer", "dispatch_output")}
"""Parameters of the functions of a method of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """The extension points of one SGLang."""

    name: ClassVar[str] = "SGLang"
    registry: Any
    """SGLang's registry of hooks."""
    around: Any
    """The kind of a hook that gets the original function first."""
    targets: frozenset[str]
    """The methods and functions of MIXED, SCALED and PRODUCTS that this version has."""
    device_type: str
    """The device type of layers that the plugin serves."""
    is_invariant: Callable[[], bool]
    """Function that tells if SGLang's own products are batch-invariant now, after the model is loaded."""
    combined: Callable[..., Any] | None
    """SGLang's record of a result of experts, or None if this version has no such experts."""
    argument: Callable[..., Any]
    """Function that returns an argument of the server, as it is in effect, by its path in newer versions."""

    @property
    def batch_invariant(self) -> bool:
        """True if the user asks SGLang for ``--enable-deterministic-inference``."""
        return bool(self._asked("exec", "deterministic", "enable_deterministic_inference")) or self.is_invariant()

    @property
    def most_rows(self) -> int | None:
        """The most rows of a batch of prompts, if the arguments name them."""
        rows = [self._asked("schedule", name) for name in ("chunked_prefill_size", "max_prefill_tokens")]
        return max((x for x in rows if isinstance(x, int) and x > 0), default=None)

    @property
    def bounded(self) -> bool:
        """True if no batch has more than ``most_rows``: prompts are cut into chunks, and ranks do not gather their rows."""
        chunk, alone = self._asked("schedule", "chunked_prefill_size"), self._asked("parallel", "attn_dp_size")
        alone = alone == 1 or self._asked("parallel", "enable_dp_attention") is False
        return isinstance(chunk, int) and chunk > 0 and alone

    def _asked(self, *path: str) -> Any:
        """Return an argument of the server, or None if this process serves nothing or the version has no such argument."""
        try:
            return self.argument(*path)
        except (AttributeError, RuntimeError, ValueError):
            return None


def find_points() -> Points | Missing:
    """Return the extension points of the installed SGLang, or the names that it lacks."""
    finder = Finder("sglang")
    registry, kinds = (finder.get("sglang.srt.plugins.hook_registry", name) for name in ("HookRegistry", "HookType"))
    is_cuda = finder.get("sglang.srt.utils", "is_cuda")
    is_invariant = finder.get("sglang.srt.batch_invariant_ops", "is_batch_invariant_mode_enabled")
    finder.check(finder.get(*DENSE.rsplit(".", 1)), FUNCTIONS)
    if finder.absent:
        return finder.missing()
    return Points(
        registry=registry, around=kinds.AROUND, targets=frozenset(_present()), is_invariant=is_invariant,
        device_type="cuda" if is_cuda() else "cpu", combined=_combined(), argument=_reader(),
    )  # fmt: skip


def _present() -> list[str]:
    """Return the targets that this version and platform have, with the parameters that the plugin passes on."""
    found = []
    for target in (*MIXED, *SCALED, *PRODUCTS):
        finder = Finder("sglang")
        point = finder.get(*target.rsplit(".", 1))
        finder.check(point if isinstance(point, type) else None, FUNCTIONS)
        found += [target] if not finder.absent else []
    return found


def _combined() -> Callable[..., Any] | None:
    """Return ``Points.combined``."""
    finder = Finder("sglang")
    finder.check(finder.get(*EXPERTS.rsplit(".", 1)), OF_EXPERTS)
    combined: Callable[..., Any] | None = finder.get(*COMBINED.rsplit(".", 1))
    return None if finder.absent else combined


def _reader() -> Callable[..., Any]:
    """Return the function ``Points.argument``. Older versions have all arguments in one object, newer ones in groups."""
    finder = Finder("sglang")
    if finder.get("sglang.srt.runtime_context", "get_exec") is None:
        whole = finder.get("sglang.srt.server_args", "get_global_server_args")
        return lambda *path: getattr(whole(), path[-1])
    groups = vars(import_module("sglang.srt.runtime_context"))
    return lambda group, *path: functools.reduce(getattr, path, groups[f"get_{group}"]())
