"""Settings ``cutlass_*``: regexes that apply before the ranking, threshold and cap, also when changed between calls."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch

from gemmtune import cli, settings
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.choice import Offers
from gemmtune.device import preset
from gemmtune.effort import EFFORT
from gemmtune.filters import schedule_of, tile_of
from gemmtune.problem import Problem
from gemmtune.selector.offers import offers_for, widest_offers_for
from gemmtune.settings import Settings

pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")

SM90 = preset("sm90")
STREAM_K_SHAPES = ((128, 16, 128), (1024, 256, 1024), (16384, 1024, 16384), (16384, 1408, 16384))


def mm(m: int = 512, n: int = 512, k: int = 512) -> Problem:
    return Problem.mm(m, n, k, device_type="cuda")


def offers(
    problem: Problem | None = None, arch: str = "sm90", backends: tuple[str, ...] = ("cutlass",), **changes: object
) -> Offers:
    chosen = Settings(backends=backends, **changes)  # type: ignore[arg-type]
    return offers_for(problem or mm(), preset(arch), chosen, on_this_machine=False)


def names(found: Offers) -> list[str]:
    return [choice.name for choice in found.choices]


@pytest.mark.parametrize("shape", STREAM_K_SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("setting", ["cutlass_op_allowlist_regex", "choice_allowlist_regex"])
def test_only_stream_k(shape: tuple[int, int, int], setting: str) -> None:
    found = names(offers(mm(*shape), **{setting: "stream_k"}))
    assert len(found) == EFFORT["default"].configs["cutlass"]
    assert all("stream_k" in name for name in found)


def test_allowed_operations_are_tried_regardless_of_rank() -> None:
    """Check SM80 operations, which no unfiltered search tries on SM90."""
    older = "^cutlass:cutlass_tensorop"
    assert not any(re.search(older, name) for name in names(offers()))
    found = offers(cutlass_op_allowlist_regex=older)
    assert len(found.choices) == EFFORT["default"].configs["cutlass"]
    assert all(re.search(older, name) for name in names(found))
    [reason] = {r.reason for r in found.refusals if "cutlass_op" in r.reason}
    assert reason == f"cutlass_op_allowlist_regex {older!r} does not match the name"


@pytest.mark.parametrize("deny", ["pingpong", "stream_k|pingpong", "_align8_"])
def test_denied_operations_make_room_for_others(deny: str) -> None:
    without, found = offers(), offers(cutlass_op_denylist_regex=deny)
    assert any(re.search(deny, name) for name in names(without))
    assert not any(re.search(deny, name) for name in names(found))
    assert len(found.choices) == len(without.choices)
    assert f"cutlass_op_denylist_regex {deny!r} matches the name" in {r.reason for r in found.refusals}


def test_axes_are_part_of_the_name() -> None:
    found = names(offers(cutlass_op_allowlist_regex="rastern_swizzle8$"))
    assert len(found) == EFFORT["default"].configs["cutlass"]
    assert all(name.endswith("_rastern_swizzle8") for name in found)


def test_every_listed_name_can_be_requested_alone() -> None:
    for name in names(offers())[::5]:
        assert names(offers(cutlass_op_allowlist_regex=f"^{re.escape(name)}$")) == [name]
        assert names(offers(choice_allowlist_regex=f"^{re.escape(name)}$")) == [name]


@pytest.mark.parametrize("empty", [None, ""], ids=["unset", "empty"])
def test_an_empty_regex_filters_nothing(empty: str | None) -> None:
    assert names(offers(cutlass_op_allowlist_regex=empty, cutlass_op_denylist_regex=empty)) == names(offers())


def test_deny_wins() -> None:
    found = names(offers(cutlass_op_allowlist_regex="pingpong|stream_k", cutlass_op_denylist_regex="pingpong"))
    assert found
    assert all("stream_k" in name and "pingpong" not in name for name in found)


def test_regexes_leave_other_backends_alone() -> None:
    pytest.importorskip("triton", reason="another backend that offers choices without a GPU")
    both = ("triton", "cutlass")
    with pytest.warns(RuntimeWarning, match="cutlass_op_denylist_regex"):
        found = offers(backends=both, cutlass_op_denylist_regex=".")
    assert {choice.backend for choice in found.choices} == {"triton"}
    capped = [choice.backend for choice in offers(backends=both, max_profiling_configs=2).choices]
    assert (capped.count("cutlass"), capped.count("triton")) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cutlass_op_allowlist_regex": "nowhere"},
         "cutlass_op_allowlist_regex: got 'nowhere', which matches no choice's name, such as cutlass:"),
        ({"cutlass_op_denylist_regex": "gemm"},
         "cutlass_op_denylist_regex: got 'gemm', which matches the name of every choice, such as cutlass:"),
    ],
)  # fmt: skip
def test_warns_with_name_of_regex_that_leaves_nothing(changes: dict[str, object], text: str) -> None:
    with pytest.warns(RuntimeWarning, match=re.escape(text)) as caught:
        found = offers(**changes)
    assert len(caught) == 1
    assert not found.choices
    [(setting, regex)] = changes.items()
    assert sum(refusal.reason.startswith(f"{setting} {regex!r}") for refusal in found.refusals) == len(offers().choices)


def test_changed_setting_takes_effect_in_same_process() -> None:
    before = names(offers())
    for _ in range(2):
        with settings.patch(backends=("cutlass",), cutlass_op_allowlist_regex="pingpong") as chosen:
            assert all("pingpong" in name for name in names(offers_for(mm(), SM90, chosen, on_this_machine=False)))
        with settings.patch(backends=("cutlass",), cutlass_op_denylist_regex="pingpong") as chosen:
            assert not any("pingpong" in name for name in names(offers_for(mm(), SM90, chosen, on_this_machine=False)))
        with settings.patch(backends=("cutlass",)) as chosen:
            assert names(offers_for(mm(), SM90, chosen, on_this_machine=False)) == before


def test_threshold_applies_to_product_size() -> None:
    size = 512**3
    assert offers(template_min_gemm_size=size).choices
    found = offers(template_min_gemm_size=size + 1)
    assert not found.choices
    reasons = {refusal.reason for refusal in found.refusals}
    assert f"M·N·K = {size} is below template_min_gemm_size = {size + 1}" in reasons


@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm90"])
def test_cap_is_spread_over_tiles_and_schedules(arch: str) -> None:
    problem = Problem.mm(512, 512, 512, dtype=torch.float16, device_type="cuda")
    every = offers(problem, arch).choices
    for cap in (1, 2, 4):
        found = offers(problem, arch, max_profiling_configs=cap).choices
        assert len(found) == cap
        tiles, schedules = {tile_of(c) for c in every}, {schedule_of(c) for c in every}
        assert len({tile_of(c) for c in found}) == min(cap, len(tiles))
        assert len({schedule_of(c) for c in found}) >= min(cap, len(schedules)) - 1


def test_cap_limits_tries_and_not_stored_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CutlassChoice, "obstacle", None)  # as where nvcc is
    chosen = Settings(backends=("cutlass",), max_profiling_configs=1, cutlass_op_denylist_regex="pingpong")
    assert len(names(offers_for(mm(), SM90, chosen))) == 1
    widest = names(widest_offers_for(mm(), SM90, chosen))
    assert len(widest) > 100
    assert not any("pingpong" in name for name in widest)


def test_command_line_lists_allowed_operations(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["choices", "1024x1024x1024", "--arch", "sm90", "--backends", "cutlass", "--allow", "stream_k", "--json", "-"]
    with settings.patch(cutlass_op_denylist_regex="nosmem", max_profiling_configs=3):
        assert cli.run(words) == 0
    listed = [choice["name"] for choice in json.loads(capsys.readouterr().out)["choices"]]
    assert len(listed) == 3
    assert all("stream_k" in name and "nosmem" not in name for name in listed)


def test_no_warning_if_regexes_leave_something() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert offers(cutlass_op_allowlist_regex="pingpong", choice_denylist_regex="align1_").choices
