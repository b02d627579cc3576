"""Printed lines and the summary of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import click

__all__ = ["print_row", "print_summary", "summary"]


def print_row(row: Mapping[str, Any]) -> None:
    """One line for each regime of a shape: times, ratios, share of the floor, pick, tuning time."""
    for regime, measured in row["regimes"].items():
        ours_us = measured["gemmtune_us"]
        floor = f"{100 * row['limit_us'] / ours_us:4.0f}%" if row["limit_us"] else "   ?"
        against = "  ".join(
            f"{name} {r['time_us']:9.2f} ({r['ratio']:.3f} ±{r['ratio_margin']:.3f})" for name, r in measured["references"].items()
        )
        tuning = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in row["tuning_s"].items() if seconds)
        click.echo(f"{row['name']:28} {regime:5} {ours_us:9.2f} µs  {against}  floor {floor}  {row['pick']}  [{tuning}]")
    for name, reason in row["errors"].items():
        click.echo(f"{row['name']:28} {name} failed: {reason}")


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """For each regime and reference: geometric mean and worst of the ratios; for each tuner its total time."""
    result: dict[str, Any] = {"tuning_s": _total_tuning_s(report)}
    for row in report["shapes"]:
        for regime, measured in row["regimes"].items():
            for name, reference in measured["references"].items():
                found = result.setdefault(regime, {}).setdefault(
                    name, {"geomean": 0.0, "worst": math.inf, "worst_shape": "", "shapes": 0}
                )
                found["geomean"] += math.log(reference["ratio"])  # a sum of logarithms until the end
                found["shapes"] += 1
                if reference["ratio"] < found["worst"]:
                    found |= {"worst": reference["ratio"], "worst_shape": row["name"]}
    for regime in result.keys() - {"tuning_s"}:
        for found in result[regime].values():
            found["geomean"] = math.exp(found["geomean"] / found["shapes"])
    return result


def _total_tuning_s(report: Mapping[str, Any]) -> dict[str, float]:
    total: dict[str, float] = {}
    for row in report["shapes"]:
        for name, seconds in row["tuning_s"].items():
            total[name] = total.get(name, 0.0) + seconds
    return total | {"gemmtune": report["tuning_s"]}


def print_summary(report: Mapping[str, Any]) -> None:
    """Geometric mean, worst and tuning times; ratios above 1 mean that gemmtune is faster."""
    for regime, references in report["summary"].items():
        if regime == "tuning_s":
            continue
        for name, found in references.items():
            click.echo(
                f"{regime} against {name}: geomean {found['geomean']:.3f} over {found['shapes']} shapes, "
                f"worst {found['worst']:.3f} ({found['worst_shape']})"
            )
    tuning = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report["summary"]["tuning_s"].items() if seconds)
    click.echo(f"tuning in all: {tuning}")
