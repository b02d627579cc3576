"""Filters of choices: sizes, regexes and the cap, over choices made for the purpose."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import pytest
from fake_choices import Fake, fake
from fixed_backend import FixedBackend, install

from gemmtune import filters
from gemmtune.backends.table import TEMPLATES
from gemmtune.choice import Choice, Offers, Refusal
from gemmtune.device import preset
from gemmtune.filters import by_cap, by_determinism, by_size, diverse
from gemmtune.problem import Problem
from gemmtune.selector.offers import offers_for, widest_offers_for
from gemmtune.settings import Settings

filtered = functools.partial(filters.filtered, templates=TEMPLATES)
nothing_left = functools.partial(filters.nothing_left, templates=TEMPLATES)
SMALL = Problem.mm(4, 5, 6, device_type="cpu")


def choice(name: str, backend: str = "triton", problem: Problem = SMALL, **info: Any) -> Fake:
    return dataclasses.replace(fake(name, problem, info=info), name=name, backend=backend)


def names(offers: Offers) -> list[str]:
    return [c.name for c in offers.choices]


OFFERS = Offers(
    choices=(choice("aten:mm", "aten"), choice("triton:a"), choice("triton:b"), choice("cpp:a", "cpp")),
    refusals=(Refusal(name="cublaslt", reason="no GPU"),),
)


def test_templates_below_the_size_go_and_library_calls_stay() -> None:
    kept = by_size(OFFERS, 121, ("triton", "cpp"))
    assert names(kept) == ["aten:mm"]
    assert kept.refusals[0] == OFFERS.refusals[0]
    assert {r.reason for r in kept.refusals[1:]} == {"M·N·K = 120 is below template_min_gemm_size = 121"}
    assert by_size(OFFERS, 120, ("triton", "cpp")) == OFFERS


def test_size_threshold_counts_one_matrix_of_a_batch() -> None:
    batch = Offers(choices=(choice("triton:a", problem=Problem.bmm(10, 4, 5, 6, device_type="cpu")),))
    assert not by_size(batch, 121, ("triton",)).choices


@pytest.mark.parametrize(
    ("allow", "deny", "expected"),
    [
        (None, None, ["aten:mm", "triton:a", "triton:b", "cpp:a"]),
        ("", "", ["aten:mm", "triton:a", "triton:b", "cpp:a"]),
        ("a$", None, ["triton:a", "cpp:a"]),
        ("on:a|mm", "", ["aten:mm", "triton:a"]),
        (None, "triton", ["aten:mm", "cpp:a"]),
        ("triton", "triton:a", ["triton:b"]),
        ("triton", "triton", []),
        ("^a", None, ["aten:mm"]),
        ("Triton", None, []),
    ],
)
def test_regexes(allow: str | None, deny: str | None, expected: list[str]) -> None:
    kept = filtered(OFFERS, Settings(choice_allowlist_regex=allow, choice_denylist_regex=deny))
    assert names(kept) == expected
    assert len(kept.choices) + len(kept.refusals) == len(OFFERS.choices) + len(OFFERS.refusals)


def test_a_refusal_names_the_setting_and_the_regex() -> None:
    kept = filtered(OFFERS, Settings(choice_allowlist_regex="triton", choice_denylist_regex="b$"))
    assert {r.name: r.reason for r in kept.refusals} == {
        "cublaslt": "no GPU",
        "aten:mm": "choice_allowlist_regex 'triton' does not match the name",
        "cpp:a": "choice_allowlist_regex 'triton' does not match the name",
        "triton:b": "choice_denylist_regex 'b$' matches the name",
    }


GRID = [
    choice(f"triton:{tile}_{rank}", tile=[tile, tile], padded=["a"] if padded else None)
    for rank, (tile, padded) in enumerate([(128, 0), (128, 0), (64, 0), (128, 1), (64, 1), (32, 0), (64, 0)])
]


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (1, [0]),
        (2, [0, 4]),
        (3, [0, 4, 5]),
        (4, [0, 3, 4, 5]),
        (5, [0, 2, 3, 4, 5]),
        (6, [0, 1, 2, 3, 4, 5]),
        (7, [0, 1, 2, 3, 4, 5, 6]),
        (9, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_diverse_prefers_new_tiles_and_best_rank(cap: int, expected: list[int]) -> None:
    assert [GRID.index(c) for c in diverse(GRID, cap)] == expected


def test_without_tiles_and_schedules_the_best_ranked_are_taken() -> None:
    plain: list[Choice] = [choice(f"triton:{i}") for i in range(5)]
    assert list(diverse(plain, 3)) == plain[:3]


def test_the_cap_holds_for_one_backend() -> None:
    kept = by_cap(OFFERS, 1, "triton")
    assert names(kept) == ["aten:mm", "triton:a", "cpp:a"]
    assert kept.refusals[-1] == Refusal(name="triton:b", reason="not among the 1 of 2 that max_profiling_configs allows")
    assert by_cap(OFFERS, 2, "triton") is OFFERS
    assert by_cap(OFFERS, None, "triton") is OFFERS


def test_nondeterministic_choices_need_permission() -> None:
    claims = dataclasses.replace(OFFERS.choices[1].claims, deterministic=False)
    unordered = dataclasses.replace(OFFERS, choices=(*OFFERS.choices, dataclasses.replace(choice("triton:free"), claims=claims)))
    kept = filtered(unordered, Settings())
    assert kept.choices == OFFERS.choices
    assert kept.refusals[-1] == Refusal(
        name="triton:free",
        reason="equal inputs need not give equal bits: deterministic forbids it "
        "(GEMMTUNE_DETERMINISTIC=0 allows it where torch does)",
    )
    assert by_determinism(unordered, Settings(deterministic=False)) is unordered
    assert by_determinism(OFFERS, Settings()).choices == OFFERS.choices


def test_all_filters_in_their_order() -> None:
    settings = Settings(choice_allowlist_regex="a", choice_denylist_regex="aten", max_profiling_configs=1)
    assert names(filtered(OFFERS, settings)) == ["triton:a", "cpp:a"]
    # What the regexes take away uses up nothing of the cap.
    assert names(filtered(OFFERS, Settings(choice_denylist_regex="a$", max_profiling_configs=1))) == ["aten:mm", "triton:b"]
    assert filtered(OFFERS, Settings()) is OFFERS
    below = filtered(OFFERS, Settings(template_min_gemm_size=10**6, choice_denylist_regex="triton"))
    assert {r.name: r.reason[:5] for r in below.refusals}["triton:a"] == "M·N·K"


def test_regexes_of_a_backend_filter_in_addition_to_the_common_ones() -> None:
    offers = dataclasses.replace(OFFERS, choices=(*OFFERS.choices, *(choice(f"cutlass:{x}", "cutlass") for x in ("ab", "ac", "c"))))
    settings = Settings(choice_denylist_regex="b$", cutlass_op_allowlist_regex=":a", cutlass_op_denylist_regex="nothing")
    kept = filtered(offers, settings)
    assert names(kept) == ["aten:mm", "triton:a", "cpp:a", "cutlass:ac"]
    assert {r.name: r.reason.split()[0] for r in kept.refusals[1:]} == {
        "triton:b": "choice_denylist_regex",
        "cutlass:ab": "choice_denylist_regex",
        "cutlass:c": "cutlass_op_allowlist_regex",
    }
    [text] = nothing_left(offers, Settings(cutlass_op_denylist_regex="cutlass"))
    assert text.startswith("cutlass_op_denylist_regex: got 'cutlass', which matches the name of every choice")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"choice_allowlist_regex": "triton"}, []),
        ({"choice_allowlist_regex": "x"}, ["choice_allowlist_regex: got 'x', which matches no choice's name, such as aten:mm; "
                                           "change or unset it (GEMMTUNE_CHOICE_ALLOWLIST_REGEX)"]),
        ({"choice_denylist_regex": "[ac]"}, []),
        ({"choice_denylist_regex": "[act]"}, ["choice_denylist_regex: got '[act]', which matches the name of every choice, "
                                              "such as aten:mm; change or unset it (GEMMTUNE_CHOICE_DENYLIST_REGEX)"]),
        ({"choice_allowlist_regex": "triton", "choice_denylist_regex": "t"},
         ["choice_denylist_regex: got 't', which matches the name of every choice that choice_allowlist_regex 'triton' allows, "
          "such as triton:a; change or unset it (GEMMTUNE_CHOICE_DENYLIST_REGEX)"]),
        ({"choice_allowlist_regex": "triton", "template_min_gemm_size": 1000},
         ["choice_allowlist_regex: got 'triton', which matches no choice's name, such as aten:mm; "
          "change or unset it (GEMMTUNE_CHOICE_ALLOWLIST_REGEX)"]),
    ],
    ids=["no-filter", "some-left", "allow", "deny-leaves-some", "deny", "both", "after-the-size"],
)  # fmt: skip
def test_regex_that_excludes_everything_is_reported(changes: dict[str, Any], expected: list[str]) -> None:
    assert nothing_left(OFFERS, Settings(**changes)) == expected


def test_nothing_is_said_where_there_was_nothing_to_leave() -> None:
    assert nothing_left(Offers(refusals=OFFERS.refusals), Settings(choice_allowlist_regex="x")) == []


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FixedBackend:
    made = FixedBackend(["multiply", "slow", "wrong"], [Refusal(name="triton:huge", reason="too large")])
    install(monkeypatch, made)
    return made


CPU = preset("avx512")


def test_offers_are_filtered_and_warn_when_a_regex_leaves_nothing(backend: FixedBackend) -> None:
    offers = offers_for(SMALL, CPU, Settings(choice_denylist_regex="slow"))
    assert names(offers) == ["fake:multiply", "fake:wrong"]
    assert [r.name for r in offers.refusals] == ["triton:huge", "fake:slow"]
    with pytest.warns(RuntimeWarning, match=r"choice_allowlist_regex: got 'pingpong', which matches no choice's name") as caught:
        assert not offers_for(SMALL, CPU, Settings(choice_allowlist_regex="pingpong")).choices
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not widest_offers_for(SMALL, CPU, Settings(choice_allowlist_regex="pingpong")).choices


def test_the_widest_offers_have_the_regexes_and_no_cap(backend: FixedBackend) -> None:
    settings = Settings(max_profiling_configs=1, choice_denylist_regex="slow")
    assert names(offers_for(SMALL, CPU, settings)) == ["fake:multiply"]
    assert names(widest_offers_for(SMALL, CPU, settings)) == ["fake:multiply", "fake:wrong"]
    assert not widest_offers_for(SMALL, CPU, Settings(template_min_gemm_size=121)).choices
