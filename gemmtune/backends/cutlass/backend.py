"""CUTLASS backend: operations that serve a problem, ranked before anything is compiled."""

from collections import Counter
from collections.abc import Mapping

from ...choice import ONLY_COMPILED, Availability, Offers, Refusal
from ...device import DeviceInfo
from ...effort import EFFORT
from ...errors import UnavailableError
from ...filters import why_not_named
from ...problem import Problem
from ...problem.operations import QUANTIZED_OPS
from ...settings import Settings, current
from ...toolchain.nvcc import find_compiler
from ...toolchain.orientation import Oriented
from .build import NAME, CutlassChoice, name_of
from .configs import Config, Legality, check_problem, elements_of
from .operation import Operation
from .quantized import quantized_operations
from .rank import estimate_us, select
from .toolkit import distinct_operations, find_toolkit, without_twins
from .variants import Grid, Variant, legal_variants

MOST_CONVERTING = 6
"""Maximum number of operations to compile if the operands differ in width. Fewer tiles suit these."""


class CutlassBackend:
    """Choices for problems on NVIDIA GPUs."""

    name = NAME

    def available(self, device: DeviceInfo) -> Availability:
        """Return ok on a CUDA device with CUTLASS. Without nvcc, only kernels compiled before can run."""
        try:
            toolkit = f"CUTLASS {find_toolkit(current().cutlass_dir).version}"
        except UnavailableError as error:
            ok, detail = False, str(error)
        else:
            try:
                ok, detail = True, f"{toolkit}, nvcc {find_compiler().cuda}"
            except UnavailableError as error:
                ok, detail = True, f"{toolkit}, {ONLY_COMPILED}: {error}"
        if device.type != "cuda":
            return Availability(ok=False, detail=f"works on CUDA devices, not on {device.type}; here: {detail}")
        return Availability(ok=ok, detail=detail)

    def serves_by_default(self, device: DeviceInfo) -> bool:  # noqa: ARG002 - no device
        """Return False. Settings must name this backend, because each of its kernels takes half a minute to compile."""
        return False

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """Return the best operations within the search's limit. Needs CUTLASS, but neither nvcc nor a GPU."""
        reason = check_problem(problem, device)
        if reason is not None:
            return Offers(refusals=(Refusal(name=NAME, reason=reason),))
        try:
            toolkit = find_toolkit(settings.cutlass_dir)
            if problem.op in QUANTIZED_OPS:
                found = without_twins(quantized_operations(problem, toolkit, device.capability))
            else:
                elements = elements_of(problem)
                found = [op for element in elements for op in distinct_operations(toolkit, device.capability, element)]
        except UnavailableError as error:
            return Offers(refusals=(Refusal(name=NAME, reason=str(error)),))
        legality = Legality(problem, device)
        found_how = {op: legality.orientation(op) for op in found}
        legal = {op: how for op, how in found_how.items() if not isinstance(how, str)}
        refusals = Refusal.counted(NAME, "operations", Counter(how for how in found_how.values() if isinstance(how, str)))
        allowed, left_out = _allowed(legal, problem, device, settings)
        most = EFFORT[settings.search].configs[NAME]
        if most is not None and problem.widens_b:
            most = min(most, MOST_CONVERTING)
        timed = [(estimate_us(op, legal[op], problem, device), op) for op in allowed]
        choices = [
            CutlassChoice.of(Config(operation=op, variant=allowed[op]), problem, device, toolkit, swap_ab=legal[op].swap_ab)
            for op in select(timed, most)
        ]
        return Offers(choices=tuple(choices), refusals=(*refusals, *left_out))


def _allowed(
    legal: Mapping[Operation, Oriented], problem: Problem, device: DeviceInfo, settings: Settings
) -> tuple[dict[Operation, Variant], list[Refusal]]:
    """Return each operation's first launch variant whose name the settings' regexes allow, and a refusal for each reason.

    The regexes apply before the ranking. If no operation is allowed, all return: the selector refuses them, and warns.
    """
    passed: dict[Operation, Variant] = {}
    first: dict[Operation, Variant] = {}
    refused: Counter[str] = Counter()
    for op, oriented in legal.items():
        every = legal_variants(op, Grid.of(op, oriented, problem.batch, device.sm_count))
        first[op] = every[0]
        reason = None
        for variant in every:
            reason = why_not_named(name_of(Config(operation=op, variant=variant)), NAME, settings)
            if reason is None:
                passed[op] = variant
                break
        else:
            refused[str(reason)] += 1
    return (passed, Refusal.counted(NAME, "operations", refused)) if passed else (first, [])
