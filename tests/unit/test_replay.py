"""``gemmtune replay``: today's searches on stored measurements."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from store_cases import row

from gemmtune import Problem, cli, settings
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.report.known import Known, known_of
from gemmtune.report.replay import Curve, Trace, asked, device_of, replay, summary
from gemmtune.report.sources import Source, read
from gemmtune.selector.offers import interleaved, offers_for
from gemmtune.settings import Search, Settings
from gemmtune.store.key import canonical

H200 = Path(__file__).parents[2] / "benchmarks/replay/nvidia-h200.json.gz"
"""Every choice that default searches measured for 247 problems, most of them on one H200: bfloat16, and weights of 4 and 8 bits."""
EVERY_CHOICE = H200.with_name("nvidia-h100-exhaustive.json.gz")
"""Every legal choice of some products, measured on one H100."""
MOST_ROWS_OF_GEMV = 4
"""Rows up to which the data have other kernels than today's."""
MACHINE = canonical({"device": "NVIDIA H200", "arch": "sm90", "sm_count": "132", "timing": "graph"})


@pytest.fixture(scope="module")
def stored() -> Callable[[Path], Source]:
    """Return a function that reads each file once."""
    return functools.cache(read)


def mostly_known(curve: Curve) -> Curve:
    """Return the searches of which the data have half of the choices or more."""
    return dataclasses.replace(curve, traces=tuple(trace for trace in curve.traces if trace.unknown <= len(trace.regrets)))


def at_the_end(curve: Curve) -> dict[str, float]:
    return summary(curve.at(curve.budgets[-1]))


@pytest.mark.rotates(8)
@pytest.mark.parametrize("first", range(8))
def test_searches_find_what_was_found_on_an_h200(first: int, stored: Callable[[Path], Source]):
    """The stored choices are those of default searches: this says that today's ranking and variants still lead to the best."""
    found = replay(stored(H200).known[first::8], ("quick", "default"), Settings(), ("tuning",))
    assert found.problems >= 30
    assert not found.skipped
    quick, default = map(mostly_known, found.curves)
    assert len(default.traces) >= 25, "the data lack most choices of too many searches"
    assert default.known > 0.75, "the ranking has changed so much that the data say nothing"
    assert at_the_end(default)["median"] <= 0.01
    assert at_the_end(default)["worst"] <= 0.05
    assert at_the_end(quick)["median"] <= 0.01
    assert at_the_end(quick)["p95"] <= 0.05, "the likely fastest of a default search are not those of the quick one"
    assert at_the_end(quick)["worst"] <= 0.10
    assert summary(default.at(8))["p95"] <= 0.10, "what measurements favour is not tried first"
    assert default.choices < 15, "favoured choices suffice nowhere"


@pytest.mark.turn(0, 2)
@pytest.mark.rotates(2)
@pytest.mark.parametrize(("search", "every"), [("quick", 4), ("default", 1)])
def test_searches_come_near_the_fastest_of_all_legal_choices(search: Search, every: int, stored: Callable[[Path], Source]):
    known = [x for x in stored(EVERY_CHOICE).known if x.problem is not None and x.problem.m > MOST_ROWS_OF_GEMV]
    found = replay(known[::every], (search,), Settings(), ("tuning",))
    assert found.problems >= 26 / every
    assert not found.skipped
    assert found.measured > 1000, "these are no exhaustive measurements"
    [curve] = found.curves
    assert curve.known > 0.93, "a search asks for choices that were not measured"
    assert at_the_end(curve)["median"] <= 0.01
    assert at_the_end(curve)["worst"] <= 0.05


def of_problem(times: dict[str, float], m: int = 4) -> Known:
    """Return the stored choices of a product, by name and time."""
    key = Problem.mm(m, 4096, 4096, layout="nt", device_type="cuda").key
    rows = [row(i, key=key, fingerprint=MACHINE, name=name, time_us=us, info={}) for i, (name, us) in enumerate(times.items())]
    return known_of(rows)[0]


def test_a_trace_has_the_least_time_so_far_and_counts_what_is_unknown():
    problem = Problem.mm(4, 4096, 4096, layout="nt", device_type="cuda")
    wanted = Settings(backends=("triton",), search="default")
    with settings.use(wanted):
        choices = interleaved(offers_for(problem, device_of(MACHINE), wanted, on_this_machine=False).choices)
    names = [choice.name for choice in choices]
    times = [20.0, 30.0, 10.0, 40.0, 16.0, 50.0, 60.0, 70.0]
    assert len(names) > len(times)
    found = replay([of_problem(dict(zip(names, times, strict=False)))], ("default",), wanted, ("tuning",))
    [trace] = found.curves[0].traces
    assert trace.regrets[:4] == pytest.approx((1.0, 1.0, 0.0, 0.0))
    missing = {*asked(of_problem(dict(zip(names, times, strict=False))), "default", wanted, "tuning")} - {*names[: len(times)]}
    assert trace.unknown == len(missing) >= len(names) - len(times)
    assert missing >= {*names[len(times) :]}
    assert found.curves[0].known == len(trace.regrets) / (len(trace.regrets) + trace.unknown)


def test_kinds_of_kernels_take_turns():
    problem = Problem.mm(16, 4096, 4096, layout="nt", device_type="cuda")
    choices = offers_for(problem, preset("sm90"), Settings(), on_this_machine=False).choices
    turns = interleaved(choices)
    assert set(turns) == set(choices)
    kinds = [(c.backend, c.name.split("_")[0].rstrip("0123456789x"), c.info.get("swap_ab")) for c in turns]
    first = len(dict.fromkeys(kinds))
    assert len(set(kinds[:first])) == first, "a kind comes twice before each has come once"
    assert [c for c in turns if c.info.get("template") == "mm" and not c.info.get("swap_ab")] == [
        c for c in choices if c.info.get("template") == "mm" and not c.info.get("swap_ab")
    ], "the ranking of a kind has changed"


def test_curves_summarize_their_traces():
    traces = tuple(Trace(regrets=(0.5, 0.1 * i, 0.1 * i), unknown=1) for i in range(5))
    curve = Curve(search="quick", order="tuning", traces=traces)
    assert curve.budgets == [1, 2, 3]
    assert summary(curve.at(2)) == pytest.approx({"median": 0.2, "p95": 0.4, "worst": 0.4})
    assert (curve.choices, curve.known) == (3, 0.75)
    for count in (1, 2, 19, 20, 21, 40):
        found = summary([float(i) for i in range(1, count + 1)])
        assert found["median"] <= found["p95"] <= found["worst"]
        assert found["p95"] == math.ceil(0.95 * count)


def test_problems_that_cannot_be_replayed_are_counted_with_the_reason():
    few = of_problem({"aten:mm": 1.0})
    elsewhere = of_problem({f"x{i}": 1.0 + i for i in range(9)})
    machine = Known(key=elsewhere.key, fingerprint=canonical({"arch": "sm70"}), rows=elsewhere.rows)
    found = replay([few, machine], ("quick",), Settings())
    assert (found.problems, found.curves) == (0, ())
    assert list(found.skipped.values()) == [1, 1]
    assert "fewer than 8 measured choices" in found.skipped
    assert any("got 'sm70', expected one of sm75" in reason for reason in found.skipped)


def test_failed_choices_have_no_regret():
    known = of_problem({"aten:mm": 20.0} | {f"triton:x{i}": 10.0 for i in range(9)})
    failed = [row(99, key=known.key, fingerprint=MACHINE, name="aten:mm", status=Status.CRASHED, time_us=None, reason="died")]
    found = replay(
        [Known(key=known.key, fingerprint=MACHINE, rows=(*known.rows[1:], *failed))], ("quick",), Settings(backends=("aten",))
    )
    assert not found.curves, "a search that finds nothing has no regret"


@pytest.mark.turn(1, 8)
def test_the_command_and_the_section_of_a_report(tmp_path, own_store, capsys):
    out = tmp_path / "x.json"
    assert cli.run(["replay", str(H200), "--every", "100", "--search", "quick", "--order", "tuning", "--json", str(out)]) == 0
    assert "3 problems, " in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert [(curve["search"], curve["order"]) for curve in data["curves"]] == [("quick", "tuning")]
    assert [budget["choices"] for budget in data["curves"][0]["budgets"]][:3] == [1, 2, 4]
    small = tmp_path / "small.json.gz"
    content = json.loads(gzip.decompress(H200.read_bytes()))
    small.write_bytes(gzip.compress(json.dumps(content | {"measurements": content["measurements"][::100]}).encode()))
    page = tmp_path / "page.html"
    assert cli.run(["report", str(small), "--html", str(page), "--replay"]) == 0
    text = page.read_text()
    assert text.count("<polyline ") == 2 * 3
    assert "Regret by measured choices" in text
    assert "<text class=middle" in text or "class=middle>" in text
    assert "svg .middle { text-anchor: middle; }" in text


def test_files_that_cannot_be_replayed_are_errors(tmp_path, own_store, capsys):
    torn = tmp_path / "torn.json.gz"
    torn.write_bytes(H200.read_bytes()[:1000])
    assert cli.run(["replay", str(torn)]) == 1
    assert f"cannot read {torn}" in capsys.readouterr().err
    assert cli.run(["replay"]) == 1
    assert "got 0 problems, expected some with enough measured choices" in capsys.readouterr().err
    assert cli.run(["report", str(torn), "--replay"]) == 2
    assert "--replay: expected --html too" in capsys.readouterr().err
    assert cli.run(["report", str(torn), "--replay", "--html", str(tmp_path / "page.html")]) == 1
    assert f"cannot read {torn}" in capsys.readouterr().err
