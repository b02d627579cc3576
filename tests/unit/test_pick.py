"""The pick and the shortlist are functions of the outcomes alone."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given
from hypothesis import strategies as st

from gemmtune.backends.table import BACKENDS
from gemmtune.choice import Status
from gemmtune.selector.pick import KERNEL_TIE, NEAR, pick, shortlist
from gemmtune.selector.result import DISTURBED, HOST_US, PLACE, Outcome
from gemmtune.timing.rounds import TIE


def outcome(name: str, time_us: float | None, *, finalist: bool = True, baseline: bool = False, host_us: float = 0.0) -> Outcome:
    return Outcome(
        name=name,
        backend=name.split(":", maxsplit=1)[0],
        content_hash=name,
        status=Status.OK if time_us is not None else Status.WRONG_RESULT,
        time_us=time_us,
        finalist=finalist,
        baseline=baseline,
        info={HOST_US: host_us} if host_us else {},
    )


outcomes_strategy = st.lists(
    st.builds(
        outcome,
        st.sampled_from([f"{backend}:{i}" for backend in BACKENDS for i in range(5)]),
        st.none() | st.floats(1, 100),
        finalist=st.booleans(),
    ),
    unique_by=lambda o: o.name,
)


def test_the_fastest_wins():
    assert pick([outcome("triton:a", 20.0), outcome("triton:b", 18.0), outcome("aten:mm", 24.0)]).name == "triton:b"


def test_a_wrong_choice_is_never_picked():
    wrong = dataclasses.replace(outcome("triton:a", 1.0), status=Status.WRONG_RESULT)
    assert pick([wrong, outcome("triton:b", 18.0)]).name == "triton:b"
    assert pick([wrong]) is None


def test_a_tie_goes_to_the_library():
    assert pick([outcome("triton:a", 20.0), outcome("aten:mm", 20.0 * (1 + KERNEL_TIE / 2))]).name == "aten:mm"


def test_just_outside_a_tie_the_fastest_wins():
    assert pick([outcome("triton:a", 20.0), outcome("aten:mm", 20.0 * (1 + 1.5 * KERNEL_TIE))]).name == "triton:a"


def test_torch_stays_unless_the_gain_is_large_on_a_busy_machine():
    for disturbed, picked in (((), "triton:a"), (("triton:a",), "aten:mm"), (("aten:mm",), "aten:mm")):
        for time_us in (20.0, 5.0):  # a launch takes longer than the second
            pair = [outcome("triton:a", time_us), outcome("aten:mm", 1.2 * time_us, baseline=True)]
            pair = [dataclasses.replace(o, info={DISTURBED: "a neighbour"}) if o.name in disturbed else o for o in pair]
            assert pick(pair).name == picked
    far = [outcome("triton:a", 20.0), dataclasses.replace(outcome("aten:mm", 26.0, baseline=True), info={DISTURBED: "x"})]
    assert pick(far).name == "triton:a"


def test_whole_calls_use_the_tie_of_torch():
    calls = [outcome("cpp:a", 20.0, host_us=3.0), outcome("aten:mm", 20.0 * (1 + 0.9 * TIE), host_us=3.0)]
    assert pick(calls).name == "aten:mm"
    assert 1.1 * KERNEL_TIE < 0.9 * TIE


def test_torch_stays_unless_something_is_clearly_faster():
    torch = outcome("aten:mm", 20.0 * (1 + 0.9 * TIE), baseline=True)
    assert pick([outcome("triton:a", 20.0), torch]).name == "aten:mm"
    torch = outcome("aten:mm", 20.0 * (1 + 1.1 * TIE), baseline=True)
    assert pick([outcome("triton:a", 20.0), torch]).name == "triton:a"


def test_within_a_backend_ties_follow_its_model():
    tied = {name: outcome(name, time_us) for name, time_us in (("cpp:a", 20.0), ("cpp:b", 20.1), ("cpp:c", 20.15), ("cpp:d", 21.0))}
    assert pick(list(tied.values())).name == "cpp:a"
    for place, name in enumerate(["cpp:d", "cpp:c", "cpp:b"]):
        tied[name] = dataclasses.replace(tied[name], info={PLACE: place})
    assert pick(list(tied.values())).name == "cpp:c"
    assert pick([*tied.values(), outcome("aten:mm", 20.18)]).name == "aten:mm"


def test_launch_bound_ties_go_to_our_own_kernels():
    torch = outcome("aten:mm", 5.0, baseline=True)
    assert pick([torch, outcome("triton:a", 5.02)]).name == "triton:a"
    assert pick([torch, outcome("triton:a", 5.2)]).name == "aten:mm"
    called = [outcome("aten:mm", 7.0, baseline=True, host_us=2.0), outcome("triton:a", 7.02, host_us=2.0)]
    assert pick(called).name == "aten:mm"
    assert pick([outcome("aten:mm", 5.08, baseline=True), outcome("cublaslt:a", 5.0)]).name == "aten:mm"
    assert pick([outcome("aten:mm", 10.0, baseline=True), outcome("triton:a", 10.02)]).name == "aten:mm", "not too short"
    assert pick([outcome("other:a", 20.0), outcome("triton:a", 20.1)]).name == "triton:a", "other packages' backends come last"


def test_final_rounds_outrank_short_measurements():
    assert pick([outcome("triton:a", 5.0, finalist=False), outcome("triton:b", 6.0, finalist=True)]).name == "triton:b"


def test_failures_are_never_picked():
    assert pick([outcome("aten:mm", None), outcome("triton:a", None)]) is None
    assert pick([]) is None


@given(outcomes_strategy, st.randoms())
def test_the_order_of_the_outcomes_does_not_matter(outcomes: list[Outcome], rng: random.Random):
    shuffled = outcomes.copy()
    rng.shuffle(shuffled)
    assert pick(outcomes) == pick(shuffled)


@given(outcomes_strategy)
def test_the_pick_is_within_the_tie_of_the_fastest_comparable(outcomes: list[Outcome]):
    chosen = pick(outcomes)
    valid = [o for o in outcomes if o.status is Status.OK]
    comparable = [o for o in valid if o.finalist] or valid
    if not comparable:
        assert chosen is None
    else:
        assert chosen.time_us <= min(o.time_us for o in comparable) * (1 + TIE)


@given(outcomes_strategy, st.sampled_from([8, 16, 32]))
def test_the_shortlist_is_short_and_near_the_best(outcomes: list[Outcome], most: int):
    chosen = shortlist(outcomes, most)
    assert len(chosen) <= most
    times = [o.time_us for o in chosen]
    assert times == sorted(times)
    assert all(t <= NEAR * times[0] for t in times)


def test_the_baseline_is_always_on_the_shortlist():
    listed = shortlist([outcome("triton:a", 1.0), outcome("aten:mm", 50.0, baseline=True), outcome("triton:b", 49.0)], 8)
    assert [o.name for o in listed] == ["triton:a", "aten:mm"]


def test_one_kernel_has_a_limit_on_the_shortlist():
    outcomes = [outcome(f"cutlass:a{i}", 10.0 + i / 100) for i in range(9)] + [outcome(f"cutlass:b{i}", 11.0) for i in range(2)]
    outcomes += [outcome(f"aten:{i}", 12.0) for i in range(5)]
    kernels = {o.name: o.name[:-1] if o.backend == "cutlass" else None for o in outcomes}
    chosen = [o.name for o in shortlist(outcomes, 9, lambda o: kernels[o.name])]
    assert chosen == ["cutlass:a0", "cutlass:a1", "cutlass:a2", "cutlass:b0", "cutlass:b1", *(f"aten:{i}" for i in range(4))]


def test_the_shortlist_respects_factor_and_count():
    outcomes = [outcome("triton:a", 8.0), outcome("triton:b", 10.0), outcome("triton:c", 10.1), outcome("triton:d", None)]
    assert [o.name for o in shortlist(outcomes, 8)] == ["triton:a", "triton:b"]
    assert [o.name for o in shortlist(outcomes, 1)] == ["triton:a"]
    assert [o.name for o in shortlist(outcomes, 8, near=2.0)] == ["triton:a", "triton:b", "triton:c"]
    assert shortlist([outcome("triton:d", None)], 8) == []
