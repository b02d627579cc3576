"""Streams, CUDA graphs and large offsets: parts of the checks without a GPU, and the whole checks on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from conformance_gemms import (
    CPU,
    assert_conforms,
    assert_found,
    cases_of,
    failed,
    subject_of,
    texts,
    torch_subject,
)

from gemmtune.conformance.bench.outcome import CaseStatus, Outcome
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Level, Scope
from gemmtune.conformance.properties.large import FAR, far_layout
from gemmtune.conformance.runs.isolation import judge
from gemmtune.declaration.layouts import OperandLayout

Product = Callable[..., torch.Tensor]


class FakeGraph:
    """Graph that calls the captured function again."""

    calls: ClassVar[list[Callable[[], object]]] = []

    def replay(self) -> None:
        self.calls[-1]()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all streams of torch.cuda the same, so that the checks' work around the calls runs on a CPU."""

    class Stream:
        def __init__(self, *_: object) -> None: ...

        def wait_stream(self, _: object) -> None: ...

    @contextlib.contextmanager
    def within(_: object, **__: object) -> Iterator[None]:
        yield

    for name, value in {
        "Stream": Stream, "stream": within, "_sleep": lambda _: None, "synchronize": lambda *_: None,
        "current_stream": Stream, "CUDAGraph": FakeGraph, "graph": within, "graph_pool_handle": lambda: (0, 1),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


def capturable(product: Product) -> Product:
    """Return a GEMM that shows ``FakeGraph`` how to run it again, with the same operands and result."""

    def call(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        result = product(a, b) if out is None else out.copy_(product(a, b))
        FakeGraph.calls.append(lambda: result.copy_(product(a, b)))
        return result

    return call


def remembered() -> Product:
    """Return a product that reads operands at an address only once."""
    kept: dict[int, torch.Tensor] = {}
    return lambda a, b: a @ kept.setdefault(b.data_ptr(), b.clone())


def checked(product: Product, case: Case) -> Outcome:
    return judge(subject_of(product, out=True, streams=True, capturable=True), case, CPU)


SIZES = {"m": 17, "n": 33, "k": 40}


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "case",
    [
        Case(property_name="streams", variant="late_inputs", **SIZES),
        Case(property_name="streams", variant="busy_default", dtype="float16", **SIZES),
        Case(property_name="graph-replay", **SIZES),
        Case(property_name="graph-replay", out="row", **SIZES),
    ],
    ids=lambda case: case.id,
)
def test_around_the_calls(case: Case) -> None:
    right = checked(capturable(torch.matmul), case)
    assert right.status is CaseStatus.PASSED, texts([right])
    wrong = checked(capturable(remembered()), case)
    stage = "side stream" if case.property_name == "streams" else "replay 2 of 3"
    assert f"{case.property_name}: {stage}: P5 cancellation: out[" in texts([wrong])


@pytest.mark.usefixtures("no_gpu")
def test_a_graph_that_does_not_write_the_result_is_found() -> None:
    def only_once(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        FakeGraph.calls.append(lambda: None)
        return a @ b

    found = texts([checked(only_once, Case(property_name="graph-replay", **SIZES))])
    assert "graph-replay: replay 1 of 3: P5 cancellation: out[0, 0] was not written" in found


@pytest.mark.usefixtures("no_gpu")
def test_a_call_that_cannot_be_captured_is_reported() -> None:
    calls: list[None] = []

    def not_while_captured(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) > 4:  # one call, three to warm up
            raise RuntimeError("operation not permitted when stream is capturing")
        return a @ b

    subject = subject_of(not_while_captured, capturable=True, dtypes=("float32",), layouts=("row",))
    outcome = judge(subject, Case(property_name="graph-replay", **SIZES), CPU)
    assert outcome.status is CaseStatus.RAISED
    assert "while captured in a CUDA graph: RuntimeError: operation not permitted" in outcome.reason


@pytest.mark.parametrize(
    ("name", "device", "declared", "reason"),
    [
        ("streams", "cpu", {"streams": True}, "needs a GPU"),
        ("streams", "cuda", {}, "streams is not declared"),
        ("graph-replay", "cuda", {}, "capturable is not declared"),
        ("large-sizes", "cpu", {}, "needs a GPU"),
        ("large-sizes", "cuda", {}, "tested at level exhaustive"),
    ],
)
def test_untested_properties_have_a_reason(name: str, device: str, declared: dict[str, Any], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        cases_of(name, subject_of(torch.matmul, **declared), device=device)


@pytest.mark.parametrize("name", ["streams", "graph-replay"])
def test_there_are_cases_on_a_gpu(name: str) -> None:
    subject = torch_subject(streams=True, capturable=True)
    cases = cases_of(name, subject, device="cuda")
    assert {case.op for case in cases} == set(Scope(traits=subject.traits).tested_ops)
    assert len({case.variant + case.out for case in cases}) == 2


@pytest.mark.parametrize(("kind", "rows", "cols"), [("row", 5, 64), ("col", 5, 64), ("row", 2, 3), ("col", 64, 2)])
def test_far_layout(kind: str, rows: int, cols: int) -> None:
    layout = OperandLayout.parse(far_layout(kind, rows, cols)).layout((rows, cols), torch.float16)
    last_line = layout.stride[0] * (rows - 1) if kind == "row" else layout.stride[1] * (cols - 1)
    assert FAR <= last_line < FAR + 64 * max(rows, cols)
    assert min(layout.stride) == 1


def test_each_operand_has_a_large_offset_in_some_case() -> None:
    cases = cases_of("large-offsets", torch_subject(dtypes=("float16",)))
    for name in ("a", "b", "out"):
        kinds = {text.partition("+")[0] for case in cases if "+" in (text := getattr(case, name))}
        assert kinds == {"row", "col"}


def test_torch_conforms_with_large_offsets() -> None:
    assert_conforms("large-offsets", torch_subject())


def with_32_bit_offsets(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a product that reads rows with an overflowing offset from the wrapped address, here the first row."""

    def read(x: torch.Tensor) -> torch.Tensor:
        far = [i for i in range(x.shape[0]) if i * x.stride(0) >= 2**31]
        return x.index_copy(0, torch.tensor(far), x[:1].expand(len(far), -1)) if far else x

    return read(a) @ read(b)


def test_offsets_of_32_bits_are_found() -> None:
    assert_found("large-offsets: P5 cancellation: out[", "large-offsets", subject_of(with_32_bit_offsets))


def test_missing_memory_is_no_fault_of_the_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967936 bytes")

    monkeypatch.setattr("gemmtune.conformance.properties.large.allocate", refuse)
    subject = torch_subject(dtypes=("float16",))
    outcome = judge(subject, cases_of("large-offsets", subject)[0], CPU)
    assert outcome.status is CaseStatus.REFUSED
    assert outcome.reason == "not possible here: 4.0 GiB of memory were refused"


# On a GPU

CUDA = torch.device("cuda")


def cuda_subject(**declared: Any) -> Any:
    """Return torch's operations on a GPU."""
    return torch_subject(**({"streams": True, "capturable": True, "threads": False} | declared))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["streams", "graph-replay", "large-offsets"])
def test_torch_conforms_on_a_gpu(name: str) -> None:
    assert_conforms(name, cuda_subject(), device=CUDA)


@pytest.mark.gpu
def test_torch_conforms_with_large_offsets_at_level_full() -> None:
    outcomes = failed(cuda_subject(), cases_of("large-offsets", cuda_subject(), Level.FULL, "cuda"), CUDA)
    assert not outcomes, texts(outcomes)


@pytest.mark.gpu
@pytest.mark.slow
def test_torch_conforms_with_large_sizes() -> None:
    subject = subject_of(torch.matmul, dtypes=("bfloat16",))
    cases = cases_of("large-sizes", subject, Level.EXHAUSTIVE, "cuda")[:3]
    outcomes = [judge(subject, case, CUDA) for case in cases]
    assert [o.status for o in outcomes] == [CaseStatus.PASSED] * 3, texts(outcomes)


def on_the_default_stream(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    with torch.cuda.stream(torch.cuda.default_stream()):
        out.copy_(a @ b)
    return out


def on_a_stream_of_its_own(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a product that waits for its inputs, but for which no stream waits."""
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    with torch.cuda.stream(own):
        torch.cuda._sleep(10_000_000)
        out.copy_(a @ b)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("product", [on_the_default_stream, on_a_stream_of_its_own])
def test_work_on_another_stream_is_found(product: Product) -> None:
    assert_found("streams: side stream: P5 cancellation: out[", "streams", subject_of(product, streams=True), device=CUDA)


@pytest.mark.gpu
def test_numbers_kept_by_a_graph_are_found() -> None:
    def with_kept_numbers() -> Product:
        kept: dict[int, torch.Tensor] = {}
        return lambda a, b: a @ kept.setdefault(b.data_ptr(), b.clone())

    subject = subject_of(with_kept_numbers(), capturable=True)
    assert_found("graph-replay: replay 2 of 3: P5 cancellation: out[", "graph-replay", subject, device=CUDA)


@pytest.mark.gpu
def test_a_call_that_synchronises_with_the_host_cannot_be_captured() -> None:
    subject = subject_of(lambda a, b: (a @ b) * float(a[0, 0].item() * 0 + 1), capturable=True, dtypes=("float32",))
    outcome = judge(subject, cases_of("graph-replay", subject, device="cuda")[0], CUDA)
    assert outcome.status.bad
    assert "while captured in a CUDA graph" in outcome.reason
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    # Later captures have memory of their own.
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    results = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(torch.full((1000,), float(len(results)), device="cuda") + 1)
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    assert [float(result.sum()) for result in results] == [1000.0, 2000.0]
