"""Allow and deny regexes, size threshold and cap over the real choices of every backend."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import pytest
from choice_lists import PROBLEMS, choices_of
from hypothesis import given
from hypothesis import strategies as st
from rotation import rotated

from gemmtune.backends.table import BACKENDS, TEMPLATES
from gemmtune.choice import Choice, Offers
from gemmtune.device import preset
from gemmtune.filters import diverse, filtered, nothing_left, schedule_of, tile_of
from gemmtune.problem import Problem
from gemmtune.selector.offers import offers_for
from gemmtune.settings import Settings

pytestmark = pytest.mark.rotates(8)

lists = st.sampled_from(sorted(PROBLEMS))
SOME = rotated(sorted(PROBLEMS), 8, "filters")


@st.composite
def regexes(draw: st.DrawFn) -> str:
    """Patterns that are found in some names: pieces of real ones, alternatives, anchors, classes; and a few found in none."""
    names = [choice.name for choice in choices_of(draw(lists))]
    name = draw(st.sampled_from(names))
    pieces = [piece for piece in re.split("([:_x])", name) if piece]
    begin = draw(st.integers(0, len(pieces) - 1))
    piece = "".join(pieces[begin : begin + draw(st.integers(1, len(pieces)))])
    kinds = [
        re.escape(piece),
        f"^{re.escape(name)}$",
        re.escape(name[:4]),
        f"{re.escape(piece)}$",
        r"\d{3}",
        "[ab]",
        ".",
        "pingpong",
    ]
    return "|".join(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2)))


def names_of(choices: Sequence[Choice]) -> list[str]:
    return [choice.name for choice in choices]


def kept(choices: Sequence[Choice], allow: str | None = None, deny: str | None = None) -> list[str]:
    settings = Settings(choice_allowlist_regex=allow, choice_denylist_regex=deny, deterministic=False)
    return names_of(filtered(Offers(choices=choices), settings, templates=TEMPLATES).choices)


@pytest.mark.turn(5, 8)
def test_the_lists_have_every_backend() -> None:
    assert {choice.backend for name in PROBLEMS for choice in choices_of(name)} == set(BACKENDS) - {"own"}
    assert any(choice.name.endswith("_pad") for choice in choices_of("sm90-mm-bf16-odd"))


@pytest.mark.parametrize("name", SOME)
def test_names_are_unique(name: str) -> None:
    names = names_of(choices_of(name, "exhaustive"))
    assert len(names) == len(set(names))


@given(lists, regexes(), regexes())
def test_what_is_kept_is_what_matches(name: str, allow: str, deny: str) -> None:
    names = names_of(choices_of(name))
    assert kept(choices_of(name), allow) == [n for n in names if re.search(allow, n)]
    assert kept(choices_of(name), None, deny) == [n for n in names if not re.search(deny, n)]
    assert kept(choices_of(name), allow, deny) == [n for n in names if re.search(allow, n) and not re.search(deny, n)]


@given(lists, regexes(), regexes(), regexes())
def test_allow_is_monotone_and_deny_antitone(name: str, one: str, more: str, other: str) -> None:
    choices = choices_of(name)
    assert set(kept(choices, one, other)) <= set(kept(choices, f"(?:{one})|(?:{more})", other))
    assert set(kept(choices, other, one)) >= set(kept(choices, other, f"(?:{one})|(?:{more})"))


@given(lists, regexes(), regexes())
def test_deny_wins(name: str, regex: str, allow: str) -> None:
    assert not any(re.search(regex, n) for n in kept(choices_of(name), allow, regex))
    assert kept(choices_of(name), regex, regex) == []


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("empty", [None, ""], ids=["unset", "empty"])
def test_an_empty_regex_filters_nothing(name: str, empty: str | None) -> None:
    offers = Offers(choices=choices_of(name))
    settings = Settings(choice_allowlist_regex=empty, choice_denylist_regex=empty, deterministic=False)
    assert filtered(offers, settings, templates=TEMPLATES) == offers
    assert nothing_left(offers, settings, templates=TEMPLATES) == []


@given(lists, regexes(), regexes(), st.none() | st.integers(1, 12), st.sampled_from([0, 10**5, 10**10]))
def test_every_choice_is_either_kept_or_refused_for_the_first_filter_that_takes_it(
    name: str, allow: str, deny: str, cap: int | None, least: int
) -> None:
    choices, problem = choices_of(name), PROBLEMS[name][0]
    settings = Settings(
        choice_allowlist_regex=allow,
        choice_denylist_regex=deny,
        max_profiling_configs=cap,
        template_min_gemm_size=least,
        deterministic=False,
    )
    offers = filtered(Offers(choices=choices), settings, templates=TEMPLATES)
    reasons = {refusal.name: refusal.reason for refusal in offers.refusals}
    order = names_of(choices)
    assert names_of(offers.choices) == [n for n in order if n not in reasons]
    assert len(offers.choices) + len(offers.refusals) == len(choices)
    for choice in choices:
        reason = reasons.get(choice.name, "")
        if choice.backend in TEMPLATES and problem.m * problem.n * problem.k < least:
            assert "template_min_gemm_size" in reason
        elif not re.search(allow, choice.name):
            assert reason == f"choice_allowlist_regex {allow!r} does not match the name"
        elif re.search(deny, choice.name):
            assert reason == f"choice_denylist_regex {deny!r} matches the name"
        else:
            assert not reason or (cap is not None and choice.backend in TEMPLATES and "max_profiling_configs" in reason)


@given(lists, regexes(), st.none() | regexes())
def test_it_is_said_exactly_when_a_regex_leaves_nothing(name: str, allow: str, deny: str | None) -> None:
    offers = Offers(choices=choices_of(name))
    said = nothing_left(offers, Settings(choice_allowlist_regex=allow, choice_denylist_regex=deny), templates=TEMPLATES)
    assert len(said) == (not kept(offers.choices, allow, deny))
    for text in said:
        blamed, regex = ("allow", allow) if not kept(offers.choices, allow) else ("deny", deny)
        assert text.startswith(f"choice_{blamed}list_regex: got {regex!r}")
        assert f"GEMMTUNE_CHOICE_{blamed.upper()}LIST_REGEX" in text


SIZES = st.sampled_from([1, 2, 7, 16, 33, 64])


@given(SIZES, SIZES, SIZES, st.sampled_from([-1, 0, 1]), st.sampled_from(["sm90", "avx512"]))
def test_templates_serve_from_the_threshold_on(m: int, n: int, k: int, below: int, arch: str) -> None:
    problem = Problem.mm(m, n, k, device_type="cpu" if arch == "avx512" else "cuda")
    settings = Settings(template_min_gemm_size=max(m * n * k + below, 0))
    offers = offers_for(problem, preset(arch), settings, on_this_machine=False)
    everything = offers_for(problem, preset(arch), Settings(), on_this_machine=False)
    large_enough = m * n * k >= settings.template_min_gemm_size
    expected = [c.name for c in everything.choices if large_enough or c.backend not in TEMPLATES]
    assert names_of(offers.choices) == expected
    assert "aten:mm" in expected


def test_an_empty_problem_is_below_every_threshold() -> None:
    empty = Problem.mm(0, 64, 64, device_type="cuda")
    offers = offers_for(empty, preset("sm90"), Settings(template_min_gemm_size=1), on_this_machine=False)
    assert not [c for c in offers.choices if c.backend in TEMPLATES]


def own(name: str) -> list[Choice]:
    """The choices that a cap is about."""
    return [choice for choice in choices_of(name, "exhaustive") if choice.backend in TEMPLATES]


@pytest.mark.turn(0, 2)
@pytest.mark.parametrize("name", SOME)
def test_a_larger_cap_adds_choices_and_drops_none(name: str) -> None:
    choices = own(name)
    before: set[str] = set()
    for cap in (*range(1, 20), len(choices) - 1, len(choices), len(choices) + 1):
        now = names_of(diverse(choices, cap))
        assert len(now) == min(cap, len(choices))
        assert set(now) >= before or cap < len(before)
        assert now == [n for n in names_of(choices) if n in now], "ranked as they were"
        assert now == names_of(diverse(choices, cap))
        before = set(now)


@pytest.mark.parametrize("name", SOME)
def test_the_cap_covers_tiles_and_schedules_first(name: str) -> None:
    choices = own(name)
    tiles, schedules = {tile_of(c) for c in choices}, {schedule_of(c) for c in choices}
    assert len(tiles) + len(schedules) > 3
    for cap in (*range(1, 10), 20, 50, len(tiles) + len(schedules)):
        taken = diverse(choices, cap)
        covered = len({tile_of(c) for c in taken}) + len({schedule_of(c) for c in taken})
        # Each one taken brings a new tile or schedule, the first one both, until nothing is left to cover.
        assert covered >= min(len(taken) + 1, len(tiles) + len(schedules))


def test_a_choice_that_splits_k_has_another_schedule() -> None:
    none, one, two = (
        schedule_of(dataclasses.replace(own(min(PROBLEMS))[0], info=info)) for info in ({}, {"splits": 1}, {"splits": 2})
    )
    assert none == one != two


@pytest.mark.parametrize("name", SOME)
def test_no_pair_of_tile_and_schedule_comes_twice_before_each_came_once(name: str) -> None:
    choices = own(name)
    pairs = {(tile_of(c), schedule_of(c)) for c in choices}
    taken = [(tile_of(c), schedule_of(c)) for c in diverse(choices, len(pairs))]
    assert set(taken) == pairs
    assert len(taken) == len(pairs)


@pytest.mark.parametrize("name", SOME)
def test_the_best_of_each_pair_stands_for_it(name: str) -> None:
    choices = own(name)
    assert diverse(choices, 1) == (choices[0],)
    pairs = {(tile_of(c), schedule_of(c)): c for c in reversed(choices)}
    assert set(names_of(diverse(choices, len(pairs)))) == {c.name for c in pairs.values()}


def test_the_cap_is_for_each_template_backend_and_leaves_library_calls_alone() -> None:
    for name in PROBLEMS:
        choices = choices_of(name)
        left = filtered(Offers(choices=choices), Settings(max_profiling_configs=2), templates=TEMPLATES).choices
        for backend in {c.backend for c in choices}:
            all_of, left_of = ([c for c in x if c.backend == backend] for x in (choices, left))
            assert len(left_of) == (min(2, len(all_of)) if backend in TEMPLATES else len(all_of))


def test_a_small_cap_tries_aligned_copies_too() -> None:
    problem, arch = PROBLEMS["sm90-mm-bf16-odd"]
    settings = Settings(backends=("triton",), max_profiling_configs=3)
    names = names_of(offers_for(problem, preset(arch), settings, on_this_machine=False).choices)
    assert {n.endswith("_pad") for n in names} == {True, False}


def test_other_settings_change_no_list_that_was_made_before() -> None:
    problem, arch = PROBLEMS["sm90-mm-bf16"]
    everything = offers_for(problem, preset(arch), Settings(), on_this_machine=False)
    denied = Settings(choice_denylist_regex="triton")
    assert names_of(offers_for(problem, preset(arch), denied, on_this_machine=False).choices) == ["aten:mm"]
    assert offers_for(problem, preset(arch), Settings(), on_this_machine=False) == everything
    with pytest.warns(RuntimeWarning, match="choice_denylist_regex: got 'triton', which matches the name of every choice"):
        offers = offers_for(problem, preset(arch), dataclasses.replace(denied, backends=("triton",)), on_this_machine=False)
    assert not offers.choices
