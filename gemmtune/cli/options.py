"""Options that several commands share, and what they mean as settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from ..backends.table import BACKENDS, check_names
from ..device import PRESETS, DeviceInfo, detect, preset
from ..errors import SettingsError, UnavailableError
from ..problem.problem import Scales, WeightScales
from ..settings import Search, Settings
from .spec import BIASES, DTYPES, ENCODINGS, FACTORS, LAYOUTS, OPS, RESULT_DTYPES, SCALES, WEIGHT_DTYPES, Spec

__all__ = ["arch_option", "device_of", "filter_options", "problem_options", "search_options", "settings_changes", "spec_of"]

F = TypeVar("F", bound=Callable[..., Any])


class _WeightDtype(click.Choice[str]):
    """The name of a dtype of b; four bits are an encoding."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in ENCODINGS:
            self.fail(f"got {value!r}, which is a way to pack b and not a dtype; give --encoding {value}", param, ctx)
        return super().convert(value, param, ctx)


def _setting(_context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Refuse what the setting that the option stands for refuses."""
    if value is not None:
        name = str(option.name)
        try:
            check_names(Settings(**settings_changes(**{name: value})).backends or ())
        except SettingsError as error:
            raise click.UsageError(f"{option.opts[0]}: {str(error).removeprefix(f'{name}: ')}") from error
    return value


def _preset(_context: click.Context, _option: click.Parameter, value: str | None) -> DeviceInfo | None:
    try:
        return None if value is None else preset(value)
    except UnavailableError as error:
        raise click.UsageError(f"--{error}") from error


arch_option = click.option(
    "--arch", metavar="ARCH", callback=_preset, help=f"One of {', '.join(PRESETS)}; this machine's device when not given."
)
"""The architecture to answer for: the command gets its DeviceInfo, or None."""


def problem_options(function: F) -> F:
    """What every shape of the command line shares."""
    return _all(
        click.option("--op", type=click.Choice(OPS), help="The operation; mm, or bmm for BxMxNxK, when not given."),
        click.option(
            "--dtype", type=click.Choice(DTYPES),
            help="Of a, and of a dense b; bfloat16 when not given, int8 for int_mm and float8_e4m3fn for scaled_mm.",
        ),
        click.option(
            "--layout", type=click.Choice(LAYOUTS), default="nt", show_default=True,
            help="BLAS letters of a and b: n is row-major, t column-major, so nt has b as an nn.Linear weight.",
        ),
        click.option(
            "--bias", type=click.Choice(BIASES),
            help="Shape of the added operand; makes the operation addmm or baddbmm, if it is not scaled_mm.",
        ),
        click.option("--alpha", type=float, default=1.0, help="Factor of the product (addmm, baddbmm)."),
        click.option("--beta", type=float, help="Factor of the added operand (addmm, baddbmm)."),
        click.option("--k2", type=click.IntRange(min=0), help="Columns of c; K when not given (mm_plus_mm)."),
        click.option("--prepacked", is_flag=True, help="b is given through gemmtune.prepack (not for batches)."),
        click.option(
            "--dtype-b", type=_WeightDtype(WEIGHT_DTYPES),
            help="Of b; int8 when not given (mixed_mm; uint8 with --encoding), or that of a (scaled_mm).",
        ),
        click.option("--encoding", type=click.Choice(ENCODINGS), help="b has two numbers of four bits in each byte (mixed_mm)."),
        click.option(
            "--scales", type=click.Choice(SCALES), metavar="KIND",
            help=f"What has a scale of its own. scaled_mm: {', '.join(get_args(Scales))}; mixed_mm: "
            f"{', '.join(get_args(WeightScales))}; int_mm_mul: {', '.join(FACTORS)}.",
        ),
        click.option("--zeros", is_flag=True, help="b has zero points as it has scales (mixed_mm)."),
        click.option("--scale-dtype", type=click.Choice(RESULT_DTYPES), help="Of the scales (int_mm_mul, mixed_mm)."),
        click.option("--out-dtype", type=click.Choice(RESULT_DTYPES), help="Of the result (int_mm_mul, scaled_mm)."),
        click.option("--fast-accum", is_flag=True, help="8-bit tensor cores may keep their narrow sum (scaled_mm)."),
    )(function)  # fmt: skip


def search_options(function: F) -> F:
    """What is tried."""
    return _all(
        click.option(
            "--backends", metavar="NAMES", callback=_setting,
            help=f"Comma-separated, out of {', '.join(BACKENDS)}; all that serve the device when not given.",
        ),
        click.option("--search", type=click.Choice(get_args(Search)), help="How many configs each template offers."),
    )(function)  # fmt: skip


def filter_options(function: F) -> F:
    """Which choices may be tried at all."""
    return _all(
        click.option(
            "--allow", "choice_allowlist_regex", metavar="REGEX", callback=_setting,
            help="Only choices in whose name REGEX is found.",
        ),
        click.option(
            "--deny", "choice_denylist_regex", metavar="REGEX", callback=_setting,
            help="No choice in whose name REGEX is found; wins over --allow.",
        ),
    )(function)  # fmt: skip


def device_of(text: str | None) -> DeviceInfo:
    """The device that ``--device`` names; None means the current CUDA device if there is one, else the CPU.

    Raises:
        click.UsageError: not the name of a device.
        UnavailableError: the device is not here.
    """
    if text is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise click.UsageError(f"--device: got {text!r}, expected cpu, cuda or cuda:N, for instance cuda:1")
    return detect(text)


def spec_of(device_type: str, options: dict[str, Any]) -> Spec:
    """The options of ``problem_options`` as a Spec."""
    return Spec(device_type=device_type, **options)


def settings_changes(**options: Any) -> dict[str, Any]:
    """The options that were given, as changes for ``settings.patch``; ``backends`` is split at its commas."""
    changes = {name: value for name, value in options.items() if value is not None}
    if "backends" in changes:
        changes["backends"] = tuple(word.strip() for word in changes["backends"].split(",") if word.strip())
    return changes


def _all(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate
