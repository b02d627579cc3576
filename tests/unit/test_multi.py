"""Several kernels behind one callable: which one runs, by table, by the first call, by hand."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_ranges import K, N, RowedBackend, W, backend, problem

import gemmtune
from gemmtune import settings
from gemmtune.errors import InvalidProblemError, NoValidChoicesError
from gemmtune.selector.session import Session
from gemmtune.tuning.members import importable
from gemmtune.tuning.multi import Multi

__all__ = ["backend"]
NAMES = ("fake:low", "fake:high")


def made(**arguments: object) -> Multi:
    arguments = {"choices": list(NAMES), "m": (1, 64)} | arguments
    return gemmtune.multi(problem(8), **arguments)  # type: ignore[arg-type]


def run(multi: Multi, m: int) -> str | None:
    """What a call runs, whose result is right, the first time and again."""
    a = torch.randn(m, K)
    for _ in range(2):
        torch.testing.assert_close(multi(a, W), a @ W)
    return multi.picked


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is examined, each time."""
    names: list[str] = []
    original = Session.examine

    def examine(self, choice, best_us):
        names.append(f"{choice.name} {choice.problem.m}")
        return original(self, choice, best_us)

    monkeypatch.setattr(Session, "examine", examine)
    return names


def test_a_table_decides(backend: RowedBackend, measured: list[str]):
    multi = made()
    assert multi.choices == NAMES
    assert multi.picked is None
    assert multi.table is not None
    assert [x.lo for x in multi.table.segments] == [1, 20]
    measured.clear()
    assert [run(multi, m) for m in (3, 19, 20, 64)] == ["fake:low", "fake:low", "fake:high", "fake:high"]
    assert not measured
    assert not any("torch" in name for name in measured), "what is no member takes no part"


def test_what_was_decided_is_in_the_store(backend: RowedBackend, measured: list[str]):
    made()
    measured.clear()
    assert run(made(), 30) == "fake:high"
    assert not measured
    other = made(choices=["fake:low"])
    assert run(other, 30) == "fake:low", "another set of members is another multi"
    assert run(made(), 30) == "fake:high"


def test_the_first_call_decides_each_m_for_itself(backend: RowedBackend, measured: list[str]):
    multi = made(decide="first_call")
    assert multi.table is None
    assert not measured
    assert run(multi, 40) == "fake:high"
    assert run(multi, 5) == "fake:low"
    assert {name.split()[1] for name in measured} == {"5", "40"}
    assert multi.table is not None
    assert [(x.lo, x.hi) for x in multi.table.segments] == [(5, 5), (40, 40)]
    measured.clear()
    again = made(decide="first_call")
    assert [run(again, 5), run(again, 40)] == ["fake:low", "fake:high"]
    assert not measured


@pytest.mark.parametrize("which", ["fake:high", 1])
def test_the_caller_decides(backend: RowedBackend, measured: list[str], which: str | int):
    multi = made(force=which)
    assert run(multi, 3) == "fake:high"
    assert run(made(force=which), 3) == "fake:high"
    assert measured == ["fake:high 3"], "nothing has to be compared, and the store knows that it is right"
    assert run(multi.force("fake:low"), 64) == "fake:low"


def test_what_is_forced_is_proved_unless_it_is_torchs(backend: RowedBackend, measured: list[str]):
    multi = made(choices=["fake:torch", wrong], force=1)
    for _ in range(2):
        with pytest.raises(NoValidChoicesError, match=r"by the one that is forced:\n  function:wrong: wrong_result: .*\nMend it"):
            multi(torch.randn(5, K), W)
    assert measured == ["function:wrong 5"]
    assert run(pickle.loads(pickle.dumps(multi.force(0))), 5) == "fake:torch"
    with settings.patch(verify=False, multi_kernel=1):
        made(choices=["fake:torch", wrong])(torch.randn(6, K), W)
    assert measured == ["function:wrong 5"]


def test_the_setting_decides_by_place(backend: RowedBackend):
    with settings.patch(multi_kernel=1):
        multi = made()
        assert run(multi, 3) == "fake:high"
    assert run(multi, 3) == "fake:low", "what decides is the setting of the call"
    with settings.patch(multi_kernel=1):
        assert run(multi, 3) == "fake:high"
        assert run(made(settings=settings.Settings(tune_in_subprocess=False)), 3) == "fake:low"
        assert run(multi.force(0), 30) == "fake:low"
    with settings.patch(multi_kernel=2), pytest.raises(InvalidProblemError, match=r"multi_kernel: got 2, expected .* 1: fake:high"):
        run(multi.force(None), 3)
    assert run(made(force=1).force(None), 3) == "fake:low"


def test_what_is_frozen_keeps_what_is_picked(backend: RowedBackend, measured: list[str]):
    multi = made(choices=["fake:torch", *NAMES]).freeze()
    assert multi.choices == NAMES
    measured.clear()
    assert run(multi, 1000) == "fake:high"
    assert not measured
    assert made(force="fake:low").freeze().choices == ("fake:low",)
    with pytest.raises(InvalidProblemError, match="has decided nothing"):
        made(decide="first_call").freeze()


def plain(a, b):
    return a @ b


def into(out, b, a):
    torch.mm(a, b, out=out)


def wrong(a, b):
    return a @ b + 1


def with_bias(a, b, x0):
    return a @ b + x0


def test_members_may_be_functions_of_some_of_the_arguments(backend: RowedBackend):
    multi = made(choices=[plain, into, "fake:low"], force="function:plain")
    assert run(multi, 5) == "function:plain"
    assert run(multi.force("function:into"), 5) == "function:into"


def tuned(a, b, /, stages=3, **more):
    return a @ b if stages == 3 and not more else a


def test_members_keep_their_defaults_and_what_is_given_by_place(backend: RowedBackend):
    assert run(made(choices=[tuned], force=0), 5) == "function:tuned"


def test_what_was_decided_among_functions_holds_for_their_code(own_store: Path):
    """One that was edited since, or whose default is another one, is measured again."""

    def made(function: Callable[..., torch.Tensor]) -> Multi:
        function.__qualname__ = "mine"
        return gemmtune.multi(problem(8), choices=[function], m=(1, 8))

    def hashed(multi: Multi) -> set[str]:
        assert run(multi, 5) == "function:mine"
        assert multi.table is not None
        return {x.content_hash for x in multi.table.segments}

    versions = (
        lambda a, b: a @ b,
        lambda a, b: torch.mm(a, b),
        lambda a, b: torch.matmul(a, b),
        lambda a, b, n=1: a @ b,
        lambda a, b, n=2: a @ b,
    )
    found = [hashed(made(x)) for x in versions]
    assert len(set().union(*found)) == len(versions)
    assert hashed(made(lambda a, b, n=2: a @ b)) == found[-1]


def test_a_multi_can_be_pickled_and_says_what_it_is(own_store: Path):
    multi = gemmtune.multi(problem(8), choices=["aten:mm", plain], m=(1, 8), force=1)
    assert run(multi, 5) == "function:plain"
    again = pickle.loads(pickle.dumps(multi.force(None).decide(range(1, 9)) and multi))
    assert run(again, 5) in again.choices
    assert repr(again) == repr(multi)
    assert "Mx24x16 float32 nt on cpu: one of aten:mm, function:plain; decided: 1..8 " in repr(multi)


def test_no_rows_are_multiplied_by_torch(backend: RowedBackend):
    multi = made(force=0)
    assert multi(torch.randn(0, K), W).shape == (0, N)
    assert multi.picked is None


def test_a_wrong_member_is_left_out_and_told_of_once(backend: RowedBackend, caplog: pytest.LogCaptureFixture):
    for _ in range(2):
        caplog.clear()
        multi = gemmtune.multi(problem(8), choices=[wrong, plain])
        assert run(multi, 8) == "function:plain"
        multi.decide(range(8, 10))
        [told] = [x.message for x in caplog.records if x.levelname == "WARNING" and "function:wrong" in x.message]
        assert "function:wrong is left out for M = 8: wrong_result: " in told
    with pytest.raises(NoValidChoicesError, match="function:wrong: wrong_result"):
        gemmtune.multi(problem(9), choices=[wrong])


def one_row(a, b):
    return (a @ b)[0]


def narrow(a, b):
    return (a @ b).half()


@pytest.mark.parametrize(("member", "returned"), [(one_row, r"float32\[24\]"), (narrow, r"float16\[9, 24\]")])
def test_a_result_of_another_shape_or_dtype_is_named(backend: RowedBackend, member: Callable[..., torch.Tensor], returned: str):
    """Neither is broadcast or cast into the result."""
    with pytest.raises(NoValidChoicesError, match=rf"returned {returned} on cpu, expected float32\[9, 24\] on cpu"):
        gemmtune.multi(problem(9), choices=[member])


def test_operands_of_an_epilogue_are_arguments_too(own_store: Path):
    a, bias = torch.randn(6, K), torch.randn(N)
    given = {"epilogue": torch.add, "epilogue_args": (bias,)}
    multi = gemmtune.multi("mm", a, W, choices=[with_bias], force=0, **given)
    torch.testing.assert_close(multi(a, W, **given), a @ W + bias)
    out = torch.empty(6, N)
    assert multi(a, W, out=out, **given) is out
    torch.testing.assert_close(out, a @ W + bias)


def unknown(a, b, c):
    return a @ b + c


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"choices": ["fake:none"]},
            r"fake:none is not among the choices .* expected names out of fake:torch, fake:low, fake:high",
        ),
        ({"choices": []}, "choices: got \\[\\], expected at least one name"),
        ({"choices": [3]}, "choices: got 3, expected names of choices, and functions"),
        ({"choices": [into, torch.mm]}, r"got \S+mm, whose parameters Python cannot read"),
        ({"choices": ["fake:low", "fake:low"]}, "got fake:low twice, expected a name of its own"),
        ({"choices": [plain, plain]}, "got plain twice, expected a name of its own for each; that of a function is its __qual"),
        ({"choices": [unknown]}, "unknown has the parameters c, expected some of a, b, out"),
        ({"force": "fake:torch"}, "got 'fake:torch', expected a name or a place out of 0: fake:low, 1: fake:high"),
        ({"force": 2}, "force: got 2"),
        ({"decide": "later"}, "decide: got 'later', expected ranges or first_call"),
        ({"m": (5, 2)}, "the empty range"),
        ({"m": [range(1, 9), range(4, 12)]}, r"m: got \[range\(1, 9\), range\(4, 12\)\], expected range\(1, 8193\), or"),
    ],
)
def test_wrong_arguments_are_refused(backend: RowedBackend, arguments: dict[str, object], message: str):
    with pytest.raises(InvalidProblemError, match=message):
        made(**arguments)


def test_another_weight_is_refused(backend: RowedBackend):
    multi = made(force=0)
    with pytest.raises(InvalidProblemError, match="expected a problem of mm Mx24x16 float32 nt on cpu, for which it was made"):
        multi(torch.randn(4, K), torch.randn(K, N))
    with pytest.raises(InvalidProblemError, match="a requires grad"):
        multi(torch.randn(4, K, requires_grad=True), W)


def test_functions_that_no_worker_finds(backend: RowedBackend):
    def local(a, b):
        return a @ b

    assert run(made(choices=[local], force=0), 5).endswith("local")
    with pytest.raises(InvalidProblemError, match="local and subprocess=True, expected functions that a worker process can import"):
        made(choices=[local], subprocess=True)
    assert importable(plain)
    assert not importable(local)


def test_a_range_without_an_m_of_the_weight_is_refused(backend: RowedBackend):
    with pytest.raises(InvalidProblemError, match=r"m: got 1\.\.3, none of which is an M of mm Mx24x16 .* an odd multiple of 8"):
        gemmtune.multi(problem(8, layout="tn"), choices=["fake:low"], m=(1, 3))


def test_block_sparse_products_are_no_multi():
    blocks = torch.eye(32).to_sparse_bsr(16)
    with pytest.raises(InvalidProblemError, match="got bsr_mm, whose weight is block-sparse, expected one of mm"):
        gemmtune.multi("bsr_mm", blocks, torch.randn(32, 8), choices=["aten:bsr_mm"])
