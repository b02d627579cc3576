"""Batch-invariant tables: classes by declaration and by observation, over choices that sum K in a known order."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_choices import CLAIMS, Fake
from fixed_backend import install
from test_proof import stepped, work_of
from test_ranges import intervals, untimed

import gemmtune
from gemmtune import settings
from gemmtune.choice import Availability, Choice, Kernel, Offers
from gemmtune.device import DeviceInfo
from gemmtune.dispatch.ready import forget_plans, plan_for
from gemmtune.errors import NoValidChoicesError
from gemmtune.integration import compile as compile_pass
from gemmtune.numerics.reduction import Reduction, even_parts, parts_of, reduction_of
from gemmtune.problem import Problem
from gemmtune.problem.grouped_compositions import spans
from gemmtune.problem.rows import row_classes
from gemmtune.selector import invariant
from gemmtune.selector.range_result import RangeResult
from gemmtune.selector.reduction_classes import MOST_FLOPS, likely_classes, mean_loss, top_row
from gemmtune.selector.segments import INVARIANT, Table
from gemmtune.settings import Settings
from gemmtune.store.row import Ranged
from gemmtune.store.store import open_store

N, K = 16, 24
W = torch.randn(N, K).t()
FEW = 16


def problem(m: int) -> Problem:
    return Problem.mm(m, N, K, dtype=torch.float32, device_type="cpu")


def summed(a: torch.Tensor, b: torch.Tensor, length: int) -> torch.Tensor:
    """Return a sum in rising order for each part of K, added in rising order. No element depends on the sizes of the others."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for begin in range(0, a.shape[1], length):
        part = torch.zeros_like(total)
        for k in range(begin, min(begin + length, a.shape[1])):
            part = part + a[:, k : k + 1].float() * b[k : k + 1].float()
        total = total + part
    return total


LENGTHS: dict[str, Callable[[int], int]] = {
    "torch": lambda m: 6,
    "run": lambda m: K,
    "wide": lambda m: K,
    "narrow": lambda m: K,
    "halves": lambda m: K // 2,
    "liar": lambda m: K if m > FEW else K // 2,
    "silent": lambda m: K,
    "turning": lambda m: K if m > FEW else 8,
    "apart": lambda m: K,
    "twin": lambda m: K,
    "steep": lambda m: K // 3,
    "even": lambda m: K,
    "rowwise": lambda m: K // 2,
    "sized": lambda m: K,
}
"""Length of the parts into which each kind divides K, by M."""
DECLARED = {
    "run": K,
    "wide": K,
    "narrow": K,
    "halves": K // 2,
    "liar": K,
    "apart": K,
    "steep": K // 3,
    "even": K,
    "rowwise": K // 2,
    "sized": K,
}
TIMES_US: dict[str, Callable[[int], float]] = {
    "torch": lambda m: 10.0,
    "run": lambda m: 20.0,
    "wide": lambda m: 12.0 if m > 32 else 30.0,
    "narrow": lambda m: 9.0,
    "halves": lambda m: 11.0,
    "liar": lambda m: 1.0,
    "silent": lambda m: 5.0,
    "turning": lambda m: 5.0,
    "apart": lambda m: 8.0,
    "twin": lambda m: 6.0,
    "steep": lambda m: 4.0 if m < 48 else 12.0,
    "even": lambda m: 10.5,
    "rowwise": lambda m: 3.0,
    "sized": lambda m: 2.0,
}


@dataclass(frozen=True, kw_only=True)
class Summing(Fake):
    """A choice that divides K by LENGTHS.

    ``narrow`` is legal for few rows only, and ``rowwise`` for rows of a that are contiguous.
    """

    kind: str

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        return made(self.kind, problem) if legal(self.kind, problem) else f"{self.kind} is illegal for {problem}"

    @property
    def batch_invariant(self) -> bool:
        return self.kind in DECLARED or self.kind == "twin"

    def bind(self, loaded: object) -> Kernel:
        length = LENGTHS[self.kind](self.problem.m)
        if self.problem.groups:
            return Kernel(run=lambda out, tensors, scalars: self.in_groups(out, *tensors[:3]))
        if self.problem.op == "mixed_mm":
            return Kernel(run=lambda out, x, scalars: out.copy_(summed(x[0], x[1].float() * x[2].float(), length)))
        return Kernel(run=lambda out, x, scalars: out.copy_(sum(x[2:], summed(x[0], x[1], length))))  # of addmm, too

    def in_groups(self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> None:
        """Multiply the rows of each group. ``sized`` divides K in two for groups of few rows."""
        length = self.problem.k // (K // LENGTHS[self.kind](self.problem.m))
        for g, (begin, end) in enumerate(spans(offs.tolist(), len(a))):
            few = self.kind == "sized" and end - begin <= 2
            out[begin:end] = summed(a[begin:end], b[g], self.problem.k // 2 if few else length)


def legal(kind: str, problem: Problem) -> bool:
    return {"narrow": problem.m <= FEW, "rowwise": problem.a.stride[1] == 1}.get(kind, True)


def made(kind: str, problem: Problem) -> Summing:
    length = problem.k // (K // DECLARED[kind]) if kind in DECLARED else None
    own = "its own" if kind == "apart" else ""
    reduction = reduction_of(problem, "fake", parts=parts_of(problem.k, length), own=own) if length else None
    claims = dataclasses.replace(CLAIMS, splits=6, reduction=reduction)
    return Summing(name=f"fake:{kind}", backend="triton", problem=problem, claims=claims, baseline=kind == "torch", kind=kind)


class SummingBackend:
    """Backend that offers ``kinds`` where they are legal."""

    name = "triton"

    def __init__(self) -> None:
        self.kinds: tuple[str, ...] = ()

    def available(self, device: DeviceInfo) -> Availability:
        return Availability(ok=True, detail="always")

    def serves_by_default(self, device: DeviceInfo) -> bool:
        return True

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        kinds = (kind for kind in self.kinds if legal(kind, problem))
        return Offers(choices=tuple(made(kind, problem) for kind in kinds))


@pytest.fixture
def backend(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SummingBackend]:
    forget_plans()
    backend = SummingBackend()
    install(monkeypatch, backend)  # type: ignore[arg-type]
    untimed(monkeypatch, lambda name, m: TIMES_US[name.removeprefix("fake:")](m))
    with settings.patch(rows="shared"):
        yield backend
    forget_plans()


def tuned(backend: SummingBackend, *kinds: str, rows: range = range(1, 65)) -> RangeResult:
    backend.kinds = kinds
    (result,) = gemmtune.tune(problem(2), m=rows, batch_invariant=True, progress=False)
    return result


def rows_differ(rows: range = range(1, 65)) -> list[int]:
    """Return the Ms at which calls give rows other bits than among all rows."""
    a = torch.randn(rows[-1], K)
    with settings.patch(batch_invariant=True):
        whole = gemmtune.mm(a, W)
        parts = {m: (gemmtune.mm(a[:m], W), gemmtune.mm(a[-m:], W)) for m in rows}
    return [m for m, (first, last) in parts.items() if not (torch.equal(first, whole[:m]) and torch.equal(last, whole[-m:]))]


@pytest.mark.parametrize("agreed", ["", "fma, K in 8 parts of 3"])
def test_one_run_and_an_agreed_class_always_compete(agreed: str):
    """The four fastest classes compete, unless those two are others."""
    lengths = (2, 4, 6, 12, 24, 3)  # K in one run and the agreed class are the slowest
    kinds = {f"fake:{x}": Reduction(unit="fma", parts=parts_of(K, x) if x < K else ()) for x in lengths}
    choices = {
        name: SimpleNamespace(batch_invariant=True, claims=SimpleNamespace(reduction=reduction))
        for name, reduction in kinds.items()
    }
    rough = {m: {name: 10.0 + i for i, name in enumerate(choices)} for m in (1, 64)}
    work = SimpleNamespace(choices=choices, wrong={}, rough=rough, agreed=agreed)
    found = [x.parts[0] if x.parts else K for x in likely_classes(work, {1: None, 64: None})]  # type: ignore[arg-type]
    assert found == ([3, 24, 2, 4] if agreed else [24, 2, 4, 6])


@pytest.mark.parametrize(("device_type", "n", "top"), [("cpu", 64, 64), ("cpu", 2**18, 32), ("cpu", 2**24, 1), ("cuda", 2**22, 64)])
def test_a_cpu_compares_rows_of_quick_products(device_type: str, n: int, top: int):
    """One row of the widest takes more than is wanted, and is compared."""
    [rows_class, *_] = row_classes(Problem.mm(1, n, MOST_FLOPS // 2**24, dtype=torch.float32, device_type=device_type))
    work = SimpleNamespace(rows_class=rows_class, rows=range(1, 65), device=SimpleNamespace(type=device_type))
    assert top_row(work) == top  # type: ignore[arg-type]


def test_a_class_has_the_fastest_of_its_choices_for_each_m(backend: SummingBackend):
    result = tuned(backend, "torch", "run", "wide", "narrow", "halves")
    assert intervals(result) == [(1, 64, "halves")], "the least total loss, although narrow is faster for few rows"
    assert result.table.reduction == "fma, K in 2 parts of 12"
    with settings.patch(tune="force"):
        result = tuned(backend, "torch", "run", "wide", "narrow")
    assert intervals(result) == [(1, FEW, "narrow"), (FEW + 1, 32, "run"), (33, 64, "wide")]
    assert result.table.reduction == "fma, K in one run"
    assert all({x.lo, x.hi} <= set(x.checked) for x in result.table.segments)
    assert not rows_differ()
    with settings.patch(batch_invariant=True, rows="shared"):
        assert [plan_for(problem(m), -1).choice.name for m in (5, 20, 1000)] == ["fake:narrow", "fake:run", "fake:wide"]


@pytest.mark.turn(3, 8)
def test_a_class_that_loses_much_to_torch_at_some_m_is_the_last(backend: SummingBackend):
    assert intervals(tuned(backend, "torch", "steep", "even")) == [(1, 64, "even")], "although steep has the least mean loss"
    with settings.patch(tune="force"):
        assert intervals(tuned(backend, "torch", "steep", "run")) == [(1, 64, "steep")], "run loses more"


def test_a_declaration_is_proved(backend: SummingBackend):
    result = tuned(backend, "torch", "run", "liar")
    assert intervals(result) == [(1, 64, "run")]
    assert "other bits alone than among 64 rows" in result.wrong["fake:liar"]
    with pytest.raises(NoValidChoicesError, match=r"liar: M = \d+: .*rows 0 to \d+ have other bits alone"):
        tuned(backend, "torch", "liar", rows=range(1, 65))


@pytest.mark.turn(0, 8)
def test_what_declares_nothing_joins_where_its_bits_are_equal(backend: SummingBackend):
    result = tuned(backend, "torch", "run", "silent")
    assert intervals(result) == [(1, 64, "silent")]
    assert "torch" not in str(result.table)
    with settings.patch(tune="force"):
        result = tuned(backend, "torch", "run", "turning")
    assert intervals(result) == [(1, FEW, "run"), (FEW + 1, 64, "turning")]
    assert not rows_differ()
    with settings.patch(batch_invariant=True), pytest.raises(NoValidChoicesError, match="no choice for M = 65"):
        gemmtune.mm(torch.randn(65, K), W)


def test_a_promise_without_a_class_is_a_class_of_one(backend: SummingBackend):
    result = tuned(backend, "torch", "twin")
    assert (intervals(result), result.table.reduction) == ([(1, 64, "twin")], "sums of fake:twin")
    with settings.patch(tune="force"):
        result = tuned(backend, "torch", "run", "twin", "narrow")
    assert intervals(result) == [(1, 64, "twin")], "run and twin have equal bits, which no declaration says"


@pytest.mark.turn(4, 8)
def test_classes_that_nobody_knows_to_be_equal_are_joined_by_their_bits(backend: SummingBackend):
    result = tuned(backend, "torch", "wide", "run", "apart", rows=range(1, 65))
    assert result.table.reduction == "fma, K in one run, its own"
    with settings.patch(tune="force"):
        result = tuned(backend, "torch", "apart", "halves")
    assert intervals(result) == [(1, 64, "apart")], "their bits differ"


@pytest.mark.turn(7, 8)
@pytest.mark.parametrize("first", ["rows", "columns"])
def test_rows_that_lie_otherwise_in_memory_have_the_same_class(backend: SummingBackend, first: str):
    """A call with columns of a in memory has another table for each power of two that divides M."""
    backend.kinds = ("torch", "rowwise", "run")
    rows = torch.randn(24, K)
    columns = rows.t().contiguous().t()
    with settings.patch(batch_invariant=True):
        whole = gemmtune.mm(rows if first == "rows" else columns, W)
        if first == "rows":
            with pytest.raises(
                NoValidChoicesError, match=r"in 2 parts of 12: refused: another stored table.*\n.*\nPass rows that are"
            ):
                gemmtune.mm(columns, W)
            backend.kinds = ("torch", "rowwise", "halves", "run")
        for m in (24, 16, 7, 1):
            for a in (rows[:m], rows[24 - m :], rows[:m].t().contiguous().t()):
                begin = 24 - m if a.data_ptr() != rows.data_ptr() and a.stride(1) == 1 else 0
                assert torch.equal(gemmtune.mm(a, W), whole[begin : begin + m]), (m, a.stride())
    tables = [Table.of(x) for x in open_store(settings.current()).every_ranged() if x.kind == INVARIANT]
    assert len(tables) > 3
    assert {x.reduction for x in tables} == {"fma, K in 2 parts of 12" if first == "rows" else "fma, K in one run"}


@pytest.mark.turn(3, 8)
def test_rows_that_share_memory_have_a_table(backend: SummingBackend):
    backend.kinds = ("torch", "run")
    one = torch.randn(1, K)
    with settings.patch(batch_invariant=True):
        assert torch.equal(gemmtune.mm(one.expand(24, K), W), gemmtune.mm(one.contiguous(), W).expand(24, N))


@pytest.mark.parametrize("kind", ["complex", "sparse", "forward mode"])
def test_products_that_only_torch_has_are_refused(backend: SummingBackend, kind: str):
    backend.kinds = ("torch", "run")
    a, w = torch.randn(3, K), W
    reason = {"complex": "the dtype is torch.complex64", "sparse": "the layout is torch.sparse_coo"}.get(kind, "forward-mode")
    make = {"complex": lambda: (a.cfloat(), w.cfloat()), "sparse": lambda: (a.to_sparse(), w)}.get(kind, lambda: (a, w))

    def call() -> torch.Tensor:
        if kind == "forward mode":
            return torch.func.jvp(lambda x: gemmtune.mm(x, w), (a,), (a,))[0]
        return gemmtune.mm(*make())

    assert call().shape == (3, N)
    with (
        settings.patch(batch_invariant=True),
        pytest.raises(NoValidChoicesError, match=rf"mm, batch-invariant:\n.*torch has to do it: {reason}.*\nGive dense tensors"),
    ):
        call()
    with settings.patch(batch_invariant=True):
        assert gemmtune.mm(a.to("meta"), w.to("meta")).shape == (3, N), "a shape has no bits"
        assert int(gemmtune.mm(torch.ones(1, 2, dtype=torch.int64), torch.ones(2, 1, dtype=torch.int64))) == 2, "exact in any order"


@pytest.mark.turn(1, 8)
def test_a_compiled_call_has_the_class(backend: SummingBackend):
    """Without an operator in the graph, the compiler would take torch's product, whose parts of K are others."""
    tuned(backend, "torch", "run")
    a = torch.randn(24, K)
    with settings.patch(batch_invariant=True, rows="shared"):
        compiled = torch.compile(lambda x: gemmtune.mm(x, W) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
        whole = gemmtune.mm(a, W) + 1
        assert all(torch.equal(compiled(a[:m]), whole[:m]) for m in (24, 7, 2))
    assert not torch.equal(a @ W + 1, whole), "torch has other bits"


@pytest.mark.turn(5, 8)
def test_graphs_of_the_pass_follow_the_setting(backend: SummingBackend):
    """Without it torch's product stays, which is faster. A graph that ran before has other launches."""
    tuned(backend, "torch", "run")
    a = torch.randn(24, K)
    compile_pass.install(tune=False)
    try:
        for way in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(lambda x: torch.mm(x, W) + 1, dynamic=way)
            with settings.patch(batch_invariant=True, tune="never"):
                whole = gemmtune.mm(a, W) + 1
                assert all(torch.equal(compiled(a[:m]), whole[:m]) for m in (24, 7)), way
                with pytest.raises(Exception, match=r"batch-invariant:\n.*nothing is stored, and tune is 'never'"):
                    torch.compile(lambda x: torch.mm(x, W[:12]))(a[:, :12].contiguous())
            torch._dynamo.reset()
            assert not torch.equal(torch.compile(lambda x: torch.mm(x, W) + 1)(a), whole)
    finally:
        compile_pass.uninstall()


def test_no_class_covers_the_range(backend: SummingBackend):
    with pytest.raises(NoValidChoicesError) as error:
        tuned(backend, "torch", "narrow")
    text = str(error.value)
    assert "M = 1..64, batch-invariant" in text
    assert "fma, K in one run: refused: fma, K in one run: no choice of the class is legal for M = 64" in text
    assert "fake:torch: refused: declares no reduction" in text
    assert "tune a smaller range of M" in text
    assert intervals(tuned(backend, "torch", "narrow", rows=range(1, 17))) == [(1, FEW, "narrow")]


def test_a_table_of_another_version_is_made_anew(backend: SummingBackend, caplog: pytest.LogCaptureFixture):
    first = tuned(backend, "torch", "run")
    store = open_store(settings.current())
    assert tuned(backend, "torch", "run").source == "store"
    [fact] = [x for x in store.every_ranged() if x.kind == INVARIANT]
    assert Table.of(fact).reduction == first.table.reduction
    old = {name: value for name, value in fact.value.items() if name != "reduction"}
    store.put_ranged(Ranged(key=fact.key, fingerprint=fact.fingerprint, kind=INVARIANT, value=old))
    assert tuned(backend, "torch", "run").source == "measured"
    assert "batch-invariant table without a reduction" in caplog.text


@pytest.mark.turn(0, 8)
@pytest.mark.parametrize(("serving", "known"), [("run", True), ("run and apart", False)])
def test_a_class_with_the_name_of_an_older_version_is_renamed(
    backend: SummingBackend, serving: str, known: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Choices of several classes do not tell which one an old name was: such a table is made anew."""
    monkeypatch.setitem(TIMES_US, "run", lambda m: 5.0 if m <= FEW else 20.0)
    kinds = ("torch", *serving.split(" and "))
    tuned(backend, *kinds)
    store = open_store(settings.current())
    [fact] = [x for x in store.every_ranged() if x.kind == INVARIANT]
    store.put_ranged(dataclasses.replace(fact, value=fact.value | {"reduction": "fma, K in a run"}))
    columns = torch.randn(K, 24).t()
    with settings.patch(batch_invariant=True):
        gemmtune.mm(columns, W)
    tables = {x.key: x.value["reduction"] for x in store.every_ranged() if x.kind == INVARIANT}
    new, *rest = (tables.pop(x) for x in (*set(tables) - {fact.key}, fact.key))
    assert "fma, K in one run" in new
    assert rest == ([new] if known else [""])
    assert caplog.text.count("which no choice declares any more: tune it again") == (not known)
    assert tuned(backend, *kinds).source == ("store" if known else "measured")


def test_exported_tables_keep_their_class(backend: SummingBackend, tmp_path: Path):
    result = tuned(backend, "torch", "run")
    open_store(settings.current()).export_file(tmp_path / "store.json")
    with settings.patch(store_path=str(tmp_path / "other.sqlite")):
        open_store(settings.current()).import_file(tmp_path / "store.json")
        again = tuned(backend, "torch", "run")
    assert (again.source, again.table.reduction) == ("store", result.table.reduction)


def test_the_class_is_shown(backend: SummingBackend):
    result = tuned(backend, "torch", "run")
    assert "batch-invariant: fma, K in one run" in str(result)
    with settings.patch(batch_invariant=True):
        assert "batch-invariant: fma, K in one run" in str(gemmtune.explain(problem(7)))


def test_loss_is_a_mean_of_logarithms():
    times = {1: {"a": 1.0, "b": 2.0}, 2: {"a": 3.0, "b": 3.0}, 4: {"a": 5.0}}
    assert mean_loss(times, {"a"}) == 0
    assert mean_loss(times, {"b"}) == pytest.approx((math.log(2) + 0 + 1) / 3)


def test_reductions_are_functions_of_k_alone():
    """The declared class of each choice of our backends stays the same at every M where it is legal."""
    from gemmtune.backends.table import load
    from gemmtune.device import detect, preset

    cases = (
        ("triton", Problem.mm(16, 512, 4096, dtype=torch.bfloat16), "sm90"),
        ("triton", Problem.mm(2, 512, 4096, dtype=torch.bfloat16), "sm80"),
        ("triton", Problem.mixed_mm(48, 512, 1024, dtype=torch.bfloat16, encoding="int4", scales="group_128"), "sm90"),
        ("triton", Problem.scaled_mm(64, 512, 1024, scales="row"), "sm90"),
        ("triton", Problem.grouped_mm(64, 512, 1024, groups=4, dtype=torch.bfloat16), "sm90"),
        ("triton", Problem.mm(128, 512, 1024, dtype=torch.float32), "sm90"),
        ("cuda", Problem.mm(16, 512, 8192, dtype=torch.bfloat16), "sm90"),
        ("cuda", Problem.mixed_mm(48, 512, 1024, dtype=torch.bfloat16, layout="nt"), "sm90"),
        ("cpp", Problem.mm(40, 96, 700, dtype=torch.float32, device_type="cpu"), ""),
    )
    seen = 0
    for name, p, arch in cases:
        device = preset(arch) if arch else detect("cpu")
        (rows_class,) = row_classes(p)
        for choice in load(name).enumerate(p, device, Settings()).choices:
            there = [at for m in (1, 2, 8, 33, 64, 500, 4096) if isinstance(at := choice.at(rows_class.at(m), device), Choice)]
            assert {at.claims.reduction for at in there} <= {choice.claims.reduction}, choice.name
            assert not (choice.claims.reduction and not choice.batch_invariant), choice.name
            seen += len(there)
    assert seen > 500


def test_sums_that_begin_where_a_row_lies_are_not_batch_invariant():
    """Blocks of a cluster begin with their own sums. Three and more do not commute, and swapped tiles have rows of a as columns."""
    from gemmtune.backends.cuda.cluster.configs import MIDDLE, ONE_RUN, SHAPES, Config
    from gemmtune.backends.cuda.cluster.family import Cluster

    p, found = Problem.mm(16, 4096, 8192, dtype=torch.bfloat16), {}
    for shape in (*SHAPES, *MIDDLE, *ONE_RUN):
        for swap in (False, True):
            config = Config(shape=shape, swap_ab=swap)
            reduction = Cluster().reduction(p, config)
            assert (reduction is None) == (not Cluster().batch_invariant(p, config)) == (swap and shape.cluster_k > 2)
            if reduction is not None:
                found.setdefault(shape.cluster_k, set()).add(str(reduction))
    assert found[1] == {"matrix, K in one run"}
    assert found[2] == {"matrix, K in 2 parts of 4096"}
    assert all("rotated" in text for text in found[4])


@pytest.mark.turn(7, 8)
def test_each_class_has_likely_choices_at_every_m():
    """A quick search lists none of some classes at some Ms. Tables of these classes need a fast kernel there."""
    from gemmtune.device import preset
    from gemmtune.selector.progress import Progress
    from gemmtune.selector.range_work import Work
    from gemmtune.selector.reduction_classes import LIKELIEST, _unalike, class_of, likeliest_in, offered_at

    (rows_class,) = row_classes(Problem.mm(2, 1536, 7168, dtype=torch.bfloat16, layout="nt", device_type="cuda"))
    quick = Settings(search="quick", backends=("aten", "triton", "cuda"))
    work = Work(rows_class, range(1, 4097), preset("sm90"), quick, 0.0, Progress())
    whole, halves = Reduction(unit="matrix"), Reduction(unit="matrix", parts=(3584, 3584))
    both = {m: likeliest_in(work, m, offered_at(work, m), [whole, halves]) for m in (1, 1024, 4096)}
    offered = {(m, x): [choice for choice in both[m] if class_of(choice) == x] for m in both for x in (whole, halves)}
    assert sum(map(len, offered.values())) == sum(map(len, both.values()))
    names = {key: {choice.name.rsplit("_s", maxsplit=1)[0] for choice in choices} for key, choices in offered.items()}
    assert {"cuda:cluster_64x16x128", "cuda:narrow_8x16x256", "triton:mm_16x16x256"} <= names[1, whole]
    assert {"cuda:cluster_64x16x128", "triton:mm_16x32x256"} <= names[1, halves]
    assert {"triton:persistent_128x128x64", "triton:mm_128x256x64"} <= names[4096, whole]
    assert {"triton:persistent_128x128x64", "triton:mm_128x256x64", "triton:runs_128x128x64"} <= names[4096, halves]
    assert {"triton:persistent_128x128x64", "triton:mm_128x256x64"} <= names[1024, halves]
    families = [choice.name.split("_")[0] for choice in offered[1, whole] if not choice.info.get("swap_ab")]
    assert max(families.count(x) for x in families) <= LIKELIEST
    shapes = [(choice.name.split("_")[0], choice.info.get("swap_ab"), *choice.info["tile"]) for choice in offered[4096, whole]]
    assert len(set(shapes)) == len(shapes), "another number of stages or warps is no other tile"
    tiles = [(64, 64, 32), (64, 64, 32), (64, 64, 64), (64, 64, 128), (128, 64, 32), (128, 64, 64)]
    made: Any = [SimpleNamespace(name=f"fake:mm_{place}", info={"tile": list(tile)}) for place, tile in enumerate(tiles)]
    assert [choice.name[-1] for choice in _unalike(made)] == ["0", "2", "4"], "two that differ along K alone, three of a family"
    filtered = dataclasses.replace(work, settings=dataclasses.replace(quick, choice_denylist_regex="cuda:.*"))
    assert {choice.backend for choice in likeliest_in(filtered, 1, offered_at(filtered, 1), [whole])} == {"triton"}


def test_three_choices_of_each_class_compete_at_an_m():
    reduction = Reduction.alone("shared")
    shared = {name: stepped(name, legal=frozenset({64}) if name == "u" else None) for name in "abcdeuvwxyz"}
    shared = {name: dataclasses.replace(x, claims=dataclasses.replace(CLAIMS, reduction=reduction)) for name, x in shared.items()}
    others = {name: stepped(name, invariant=False, baseline=name == "torch") for name in (*"pqrst", "torch")}
    at_4, at_64 = ({name: float(i) for i, name in enumerate(names)} for names in ([*others, *"abcde"], "uvwxyz"))
    work = work_of({4: at_4, 64: at_64}, **shared, **others)
    work.rough.update({4: at_4, 64: at_64})
    assert list(invariant._entrants_at_tuned(work, 4, [reduction])) == [*"pqr", "torch", *"abc", *"vwx"]
    assert list(invariant._entrants_between(work, 16, [reduction], ())) == ["torch", *"pqr", *"abc", *"vwx"]


def test_texts_of_reductions():
    p = Problem.mm(4, 8, 100, dtype=torch.bfloat16, device_type="cpu")
    texts = {
        "matrix": "matrix, K in one run",
        "matrix/32": "matrix, K in 4 parts of 32",
        "fma@8": "fma, K in one run, promoted every 8",
        "matrix/100": "matrix, K in one run",
    }
    assert {text: str(Reduction.declared(text, p, "mine")) for text in texts} == texts
    by_steps = [str(Reduction(unit="matrix", parts=even_parts(7168, step, 3))) for step in (64, 128)]
    assert by_steps == ["matrix, K in 3 parts of 2432 + 2368 + 2368", "matrix, K in 3 parts of 2432"], "unequal classes"
    assert Reduction.declared("matrix", p, "mine") == reduction_of(p, "triton"), "a kernel of anybody's joins the class of ours"
    fused = Problem.addmm(4, 8, 100, alpha=2, dtype=torch.bfloat16, device_type="cpu")
    assert str(Reduction.declared("matrix", fused, "mine")) == "matrix, K in one run, mine", (
        "who scales the sum belongs to the class"
    )
    assert Reduction.declared("fma/8", Problem.int_mm(4, 8, 16), "mine").unit == "exact"
    for text in ("", "tensor", "matrix/0", "matrix/x", "matrix@", "fma /8"):
        with pytest.raises(gemmtune.errors.InvalidProblemError, match="expected matrix or fma"):
            Reduction.declared(text, p, "mine")


def layers() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(K, N, bias=False), torch.nn.ReLU(), torch.nn.Linear(N, K, bias=False))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_of_a_layer_fails_with_a_remedy():
    model = gemmtune.optimize(layers(), batch_invariant=True)
    with pytest.raises(torch.jit.frontend.UnsupportedNodeError, match=r"restore\(model\) before torch.jit.script"):
        torch.jit.script(model)
    x = torch.randn(3, K)
    assert torch.equal(torch.jit.script(gemmtune.restore(model))(x), model(x))


@pytest.mark.turn(4, 8)
def test_layers_of_a_model_keep_the_bits_of_rows(backend: SummingBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gemmtune.integration.invariant.LEAST_ROWS", 2)
    backend.kinds = ("torch", "run", "narrow")
    model, x = layers(), torch.randn(40, K)
    expected = model(x)
    gemmtune.optimize(model, tune=x, batch_invariant=True, progress=False)
    whole = model(x)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    shapes = {
        "rows": lambda f: [f(x[:m]) for m in (1, 5, 17)],
        "one vector": lambda f: [f(x[0])[None]],
        "batches": lambda f: [f(x.view(4, 10, K)).view(40, K)],
        "strided": lambda f: [f(x.t().contiguous().t())],
        "behind an offset": lambda f: [f(torch.cat([torch.zeros(1), x[:3].flatten()])[1:].view(3, K))],
    }
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for name, calls in shapes.items():
        for f in (model, compiled) if name != "one vector" else (model,):
            assert all(torch.equal(y, whole[: len(y)]) for y in calls(f)), name
    with torch.enable_grad():
        given = x.clone().requires_grad_()
        model(given).sum().backward()
    of_rows = torch.vmap(torch.func.grad(lambda row: model(row).sum()))(x[:3])
    torch.testing.assert_close(of_rows, given.grad[:3], atol=1e-5, rtol=1e-5)
    gemmtune.restore(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    other = x.clone().requires_grad_()
    model(other).sum().backward()
    torch.testing.assert_close(given.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_layers_under_autocast_have_its_dtype_and_gradients(backend: SummingBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gemmtune.integration.invariant.LEAST_ROWS", 2)
    backend.kinds = ("torch", "run")
    model, x = layers(), torch.randn(12, K)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    gradients = []
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        gemmtune.optimize(model, tune=x, batch_invariant=True, progress=False)
        whole = model(x)
        assert whole.dtype is torch.bfloat16
        assert all(torch.equal(f(x[:m]), whole[:m]) for f in (model, compiled) for m in (2, 7))
    for f in (model, compiled, gemmtune.restore(copy.deepcopy(model))):
        model.zero_grad()
        rows = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            result = f(rows)
        assert f is not compiled or torch.equal(result, whole)
        result.float().sum().backward()
        gradients.append(rows.grad)
    for found in gradients[:2]:
        torch.testing.assert_close(found, gradients[2], atol=0.02, rtol=0.02)


@pytest.mark.turn(1, 8)
def test_graphs_of_quantized_layers_need_no_setting(backend: SummingBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gemmtune.integration.invariant.LEAST_ROWS", 2)
    backend.kinds = ("torch", "run")
    model, x = gemmtune.quantize_(torch.nn.Sequential(torch.nn.Linear(K, N)), "int8"), torch.randn(24, K)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        gemmtune.optimize(model, tune=x, batch_invariant=True, progress=False)
        whole = model(x)
        assert all(torch.equal(f(x[:m]), whole[:m]) for f in (model, compiled) for m in (1, 7, 24))
    rows = x.clone().requires_grad_()
    torch.compile(model, backend="aot_eager")(rows).sum().backward()
    assert rows.grad is not None


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
def test_a_layer_without_a_table_raises(backend: SummingBackend):
    backend.kinds = ("torch", "run")
    with settings.patch(batch_invariant=True):
        model = gemmtune.optimize(layers())
    with pytest.raises(NoValidChoicesError, match=r"gemmtune tune 1\.\.8192x16x24 .* --device cpu --batch-invariant\."):
        model(torch.randn(3, K))
    plain = gemmtune.optimize(layers())
    with settings.patch(batch_invariant=True), pytest.raises(NoValidChoicesError, match="no batch-invariant table is stored"):
        plain(torch.randn(3, K))
    tuned(backend, "torch", "run")
    with settings.patch(batch_invariant=True):
        assert torch.equal(plain[0](torch.ones(5, K))[:2], plain[0](torch.ones(2, K)))
    blocks = torch.nn.Linear(K, N, bias=False)
    blocks.weight = torch.nn.Parameter(torch.eye(N, K).to_sparse_bsr((8, 8)), requires_grad=False)
    with pytest.raises(gemmtune.errors.InvalidProblemError, match="block-sparse weight in the model"):
        gemmtune.optimize(blocks, batch_invariant=True)


def test_a_model_names_the_modules_that_are_not_covered(backend: SummingBackend):
    backend.kinds = ("torch", "run")
    model = torch.nn.ModuleDict({name: torch.nn.Bilinear(2, 2, 2) for name in ("a", "b", "c", "d")})
    model["tokens"], model["layer"], model["norm"] = torch.nn.Embedding(4, K), torch.nn.Linear(K, N), torch.nn.LayerNorm(N)
    with pytest.warns(RuntimeWarning, match=r"got modules with other matrices \(a, b, c and 1 more\), expected linear layers"):
        gemmtune.optimize(model, batch_invariant=True)
    for name in "abcd":
        del model[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemmtune.optimize(model, batch_invariant=True)


def grouped_operands(sizes: Sequence[int], groups: int = 3) -> tuple[torch.Tensor, ...]:
    a, b = torch.randn(sum(sizes), K), torch.randn(groups, N, K).mT
    return a, b, torch.tensor(sizes).cumsum(0).int()


def test_a_row_of_a_group_has_its_bits_in_groups_of_any_size(backend: SummingBackend):
    """``sized`` declares one run and does not hold it; ``silent`` declares nothing, and one M does not tell all sizes of groups."""
    backend.kinds = ("torch", "silent", "run", "sized")
    (result,) = gemmtune.tune(
        Problem.grouped_mm(2, N, K, groups=3, dtype=torch.float32, layout="nt", device_type="cpu"),
        m=range(1, 33),
        batch_invariant=True,
        progress=False,
    )
    assert intervals(result) == [(1, 32, "run")]
    assert "other bits alone than among 32 rows" in result.wrong["fake:sized"]
    a, b, offs = grouped_operands((1, 20, 11))
    with settings.patch(batch_invariant=True, tune="never"):
        whole = gemmtune.grouped_mm(a, b, offs)
        for rows in (a[1:2], a[5:17]):
            alone = gemmtune.grouped_mm(rows.clone(), b, torch.tensor([0, len(rows), len(rows)], dtype=torch.int32))
            begin = 1 if len(rows) == 1 else 5
            assert torch.equal(alone, whole[begin : begin + len(rows)])


@pytest.mark.turn(2, 8)
def test_picked_and_summed_rows_run_by_the_table_of_the_grouped_product(backend: SummingBackend):
    """An index leaves no table of M: under the setting these operations run in steps. Each token has two experts."""
    backend.kinds = ("torch", "run")
    a, b, _ = grouped_operands((4, 4, 4))
    index = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1], [0, 1], [1, 0]])
    weights = torch.rand(6, 2)

    down = torch.linspace(-1, 1, 3 * 8 * K).view(3, 8, K)

    def moe(rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        experts, slots = index.flatten().sort(stable=True)
        offs = torch.searchsorted(experts, torch.arange(3), right=True, out_int32=True)
        gated = gemmtune.grouped_mm(rows, b, offs, rows=slots // 2, gated="silu")
        return gemmtune.grouped_mm(gated, down, offs, scatter=(slots, weights), out=out)

    gates, others = torch.einsum("tk,tckn->tcn", a[:6], b[index]).chunk(2, dim=-1)
    expected = torch.einsum("tcn,tcnk,tc->tk", torch.nn.functional.silu(gates) * others, down[index], weights)
    with settings.patch(batch_invariant=True):
        whole = moe(a[:6], index, weights)
        torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-4)
        for m in (1, 2, 5):
            assert torch.equal(moe(a[:m], index[:m], weights[:m]), whole[:m]), m
        with pytest.raises(NoValidChoicesError, match=r"no table of M\nCall gemmtune.grouped_mm"):
            torch.ops.gemmtune.combined_grouped_mm(a, b, torch.tensor([4, 8, 12], dtype=torch.int32), torch.arange(12), weights)
        out = torch.empty_like(whole)
        assert moe(a[:6], index, weights, out) is out
        assert torch.equal(out, whole)
        with pytest.raises(gemmtune.errors.InvalidProblemError, match=r"out: got \[5, 24\] torch.float32, expected \[6, 24\]"):
            moe(a[:6], index, weights, out[:5])


def test_likely_choices_compete_at_powers_of_two_and_halfway_between_small_ones() -> None:
    assert [m for m in range(1, 300) if invariant._is_listed(m)] == [16, 24, 32, 48, 64, 96, 128, 256]
