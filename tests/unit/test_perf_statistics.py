"""The gate's rule: quantiles, bounds, decisions."""

from __future__ import annotations

import math

import pytest

from gemmtune.perf_gate.statistics import Decision, Estimate, Rule, bounds, judge, student_quantile

RULE = Rule()


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    # Tables of Student's t distribution, with 1.0 and tan for the two distributions with a closed form.
    [(0.99, 6, 3.142668), (0.975, 1, 12.706205), (0.95, 10, 1.812461), (0.995, 2, 9.924843), (0.99, 120, 2.357825), (0.5, 3, 0.0)],
)
def test_student_quantile(probability, freedom, quantile):
    assert student_quantile(probability, freedom) == pytest.approx(quantile, abs=2e-6)


def test_student_quantile_of_one_degree_is_that_of_cauchy():
    for probability in (0.6, 0.9, 0.999):
        assert student_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-9)


def test_student_quantile_falls_with_freedom():
    values = [student_quantile(0.99, freedom) for freedom in (1, 2, 6, 7, 1000)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(2.3301, abs=1e-4)


@pytest.mark.parametrize(("probability", "freedom"), [(0.4, 3), (1.0, 3), (0.9, 0.5), (0.9, math.nan)])
def test_student_quantile_refuses(probability, freedom):
    with pytest.raises(ValueError, match=r"expected 0\.5 ≤ probability < 1 and freedom ≥ 1"):
        student_quantile(probability, freedom)


@pytest.mark.parametrize("problems", [1, 20, 50, 51, 500])
def test_level_keeps_the_alarms_of_a_suite_below_half_a_percent(problems):
    rule = Rule.for_suite(problems)
    assert problems * rule.level**2 <= 0.005 + 1e-12
    assert rule.level <= 0.01


def test_bounds_of_one_estimate():
    estimate = Estimate.of([0.01, 0.02, 0.03])
    found = bounds(estimate, 0.01)
    assert found.log_ratio == pytest.approx(0.02)
    assert found.margin == pytest.approx(student_quantile(0.99, 2) * 0.01 / math.sqrt(3))
    assert (found.lower, found.upper) == (found.log_ratio - found.margin, found.log_ratio + found.margin)


def test_bounds_of_a_difference_have_the_error_of_both():
    now, before = Estimate(mean=0.05, spread=0.01, count=7), Estimate(mean=0.02, spread=0.01, count=7)
    found = bounds(now, 0.01, before)
    assert found.log_ratio == pytest.approx(0.03)
    assert found.margin == pytest.approx(student_quantile(0.99, 12) * math.sqrt(2 * 0.01**2 / 7))
    exact = Estimate(mean=0.02, spread=0.0, count=14)
    assert bounds(now, 0.01, exact).margin == pytest.approx(bounds(now, 0.01).margin)
    assert bounds(exact, 0.01).margin == 0


def around(log_ratio: float, noise: float = 0.001) -> list[float]:
    """Return a batch of seven values."""
    return [log_ratio + noise * (i - 3) for i in range(7)]


TOO_WIDE = "noise of ±{}% is above the ±{}% that a decision allows; measure on an idle machine"
EQUAL, SLOW, FAST = around(0.0), around(0.05), around(-0.05)


@pytest.mark.parametrize(
    ("batches", "decision", "reason"),
    [
        ([EQUAL], Decision.PASS, ""),
        ([EQUAL, EQUAL], Decision.PASS, ""),
        ([SLOW], Decision.INCONCLUSIVE, "slower in one batch, which a second one must confirm"),
        ([SLOW, SLOW], Decision.REGRESSED, ""),
        ([SLOW, EQUAL], Decision.INCONCLUSIVE, "the batches disagree"),
        ([EQUAL, SLOW], Decision.INCONCLUSIVE, "the batches disagree"),
        ([FAST], Decision.INCONCLUSIVE, "faster in one batch, which a second one must confirm"),
        ([FAST, FAST], Decision.IMPROVED, ""),
        ([FAST, EQUAL], Decision.PASS, ""),
        ([around(0.015), around(0.015)], Decision.PASS, ""),
        ([around(0.03), around(0.03)], Decision.REGRESSED, ""),
        ([around(0.0, 0.05)], Decision.INCONCLUSIVE, "noise of ±12.8% cannot exclude a slow-down of 5%, nor prove one"),
        ([around(-0.3, 0.05), around(-0.3, 0.05)], Decision.IMPROVED, ""),
        ([around(0.3, 0.05), around(0.3, 0.05)], Decision.REGRESSED, ""),
        ([around(-1.4, 0.5)] * 2, Decision.INCONCLUSIVE, TOO_WIDE.format("73.5", "70.0")),
        ([around(1.4, 0.5)] * 2, Decision.INCONCLUSIVE, TOO_WIDE.format("73.5", "70.0")),
        ([around(-0.6, 0.05), around(0.0, 0.02)], Decision.INCONCLUSIVE, TOO_WIDE.format(22.8, 4.9)),
    ],
)
def test_judge(batches, decision, reason):
    found = judge(batches, RULE)
    assert (found.decision, found.reason) == (decision, reason)
    assert found.bounds is not None
    assert found.bounds.log_ratio == pytest.approx(sum(map(sum, batches)) / sum(map(len, batches)))


def test_a_larger_limit_passes_what_it_allows_and_finds_more_than_that():
    rule = Rule.for_suite(3, 10)
    assert (rule.limit, rule.visible) == pytest.approx((1.1, 1.25))
    noises = {log_ratio: around(log_ratio, 0.02) for log_ratio in (0.0, math.log(1.08), math.log(1.26))}
    assert [judge([x, x], rule).decision for x in noises.values()] == [Decision.PASS, Decision.PASS, Decision.REGRESSED]


def test_judge_against_a_baseline():
    """Check that 30% faster than torch is no success if it was 40% before."""
    before = Estimate(mean=math.log(0.6), spread=0.003, count=14)
    now = around(math.log(0.7))
    assert judge([now, now], RULE).decision is Decision.IMPROVED
    assert judge([now, now], RULE, before).decision is Decision.REGRESSED
    assert judge([around(math.log(0.6))], RULE, before).decision is Decision.PASS


def test_judge_allows_for_a_noisy_baseline():
    before = Estimate(mean=0.0, spread=0.05, count=3)
    assert judge([SLOW, SLOW], RULE, before).decision is Decision.INCONCLUSIVE
