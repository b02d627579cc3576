"""The native look-up: calls that it serves, calls that it leaves to Python, and equal plans in both."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from native_calls import Arguments, arguments, found, in_place, known_to_python, run
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gemmtune
from gemmtune import settings
from gemmtune.backends.cpp.compiler import Compiler, find_compiler
from gemmtune.dispatch.ready import forget_plans
from gemmtune.native import build, lookup
from gemmtune.native.lookup import native
from gemmtune.ops import operate as path

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
BY_TORCH = {"backends": ("aten",), "native": True}
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _in_place(own_store: object) -> Iterator[None]:
    """Install the look-up for one test, with torch's own operations as the only choices."""
    with in_place(**BY_TORCH):
        yield


@contextlib.contextmanager
def without_native() -> Iterator[None]:
    """Disable the native path."""
    call, native.call = native.call, None
    try:
        yield
    finally:
        native.call = call


def kept(call: Arguments) -> Any:
    """Repeat a call until the look-up finds it, and return its entry."""
    run(call)
    run(call)
    return found(call)


def operands(m: int = 5, k: int = 4, n: int = 6, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)


@pytest.mark.slow  # the first that needs the module, which one process builds for all
def test_a_call_is_found_after_python_has_planned_it() -> None:
    call = arguments("mm", *operands())
    assert found(call) is False
    want = run(call)
    assert found(call) is False
    assert torch.equal(run(call), want)
    entry = found(call)
    assert entry is known_to_python(call)
    assert entry.plan.choice.name == "aten:mm"
    with without_native():
        python = run(call)
    assert torch.equal(run(call), python)


def test_a_disabled_gemmtune_leaves_the_look_up_alone() -> None:
    call = arguments("mm", *operands())
    entry = kept(call)
    with settings.patch(disable=True):
        assert found(call) is False
        for _ in range(3):
            assert torch.equal(run(call), run(call))
        assert found(call) is False
    assert found(call) is entry


def relu_of_sum(acc: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(acc + bias)


def public_calls() -> dict[str, Callable[[], Tensor]]:
    a, b = operands(33, 48, 40)
    x, y = torch.randn(3, 8, 9), torch.randn(3, 9, 7)
    inp, bias = torch.randn(33, 40), torch.randn(40)
    numbers, scales = torch.randint(-8, 8, (48, 40), dtype=torch.int8), torch.rand(1, 40)
    eights = [t.to(torch.float8_e4m3fn) for t in (a, b)]
    ints = torch.randint(-8, 8, (33, 48), dtype=torch.int8)
    one = torch.ones(1)
    weight = gemmtune.prepack(b)
    experts, offs = torch.randn(3, 48, 40), torch.tensor([20, 20, 33], dtype=torch.int32)
    return {
        "mm": lambda: gemmtune.mm(a, b),
        "mm transposed": lambda: gemmtune.mm(b.t(), a.t()),
        "mm out": lambda: gemmtune.mm(a, b, out=torch.empty(33, 40)),
        "mm out in columns": lambda: gemmtune.mm(a, b, out=torch.empty(40, 33).t()),
        "mm epilogue": lambda: gemmtune.mm(a, b, epilogue=torch.relu),
        "mm epilogue with an operand": lambda: gemmtune.mm(a, b, epilogue=relu_of_sum, epilogue_args=(bias,)),
        "mm prepacked": lambda: gemmtune.mm(a, weight),
        "addmm": lambda: gemmtune.addmm(inp, a, b, beta=2, alpha=0.5),
        "addmm vector": lambda: gemmtune.addmm(bias, a, b),
        "addmm epilogue out": lambda: gemmtune.addmm(bias, a, b, alpha=3, epilogue=torch.tanh, out=torch.empty(33, 40)),
        "bmm": lambda: gemmtune.bmm(x, y),
        "baddbmm": lambda: gemmtune.baddbmm(torch.ones(3, 8, 7), x, y, beta=0.5),
        "mm_plus_mm": lambda: gemmtune.mm_plus_mm(a, b, a, b),
        "mixed_mm": lambda: gemmtune.mixed_mm(a, numbers, scale_b=scales),
        "scaled_mm": lambda: gemmtune.scaled_mm(*eights, one, one, bias=bias, out_dtype=torch.float32),
        "int_mm": lambda: gemmtune.int_mm(ints, numbers),
        "int_mm_mul": lambda: gemmtune.int_mm_mul(ints, numbers, scales),
        "grouped_mm": lambda: gemmtune.grouped_mm(a, experts, offs, epilogue=relu_of_sum, epilogue_args=(bias,)),
    }


@pytest.mark.turn(4, 8)
@pytest.mark.parametrize("backend", ["aten", "cpp"])
def test_every_operation_is_served_with_the_bits_of_python(backend: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = public_calls()
    if backend == "cpp":  # each is compiled; the others take the same way
        taken = ("mm", "mm transposed", "mm prepacked", "addmm", "mixed_mm", "grouped_mm")
        calls = {name: calls[name] for name in taken} | {"epilogue": calls["mm epilogue with an operand"]}
    one = {"search": "quick", "max_profiling_configs": 1, "verify": False}
    with settings.patch(backends=(backend,), native=True, **one):
        for name, call in calls.items():
            with without_native():
                want = call()
            call()
            before = native.module.count()
            monkeypatch.setattr(native, "call", served_only)
            got = call()
            monkeypatch.undo()
            assert torch.equal(got, want), name
            assert (got.dtype, got.stride()) == (want.dtype, want.stride()), name
            assert native.module.count() == before, name


def served_only(*call: Any) -> Tensor:
    """Look up a call that must not reach Python."""
    assert found(call), f"{call[0]}: {found(call)}"
    result: Tensor = native.module.look_up(*call)
    return result


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Marked(Tensor):
    """A subclass of Tensor without changes."""


def unreadable(acc: Tensor) -> Tensor:
    return acc + float(os.getpid() * 0)


Case = tuple[Callable[[], AbstractContextManager[object]], Callable[[Tensor, Tensor], Arguments]]
nothing = contextlib.nullcontext


def plain(a: Tensor, b: Tensor) -> Arguments:
    return arguments("mm", a, b)


UNUSUAL: dict[str, Case] = {
    "conjugated": (nothing, lambda a, b: arguments("mm", a.to(torch.complex64).conj(), b.to(torch.complex64))),
    "negated": (nothing, lambda a, b: arguments("mm", torch._neg_view(a), b)),
    "sparse": (nothing, lambda a, b: arguments("mm", a.to_sparse(), b)),
    "quantized": (nothing, lambda a, b: arguments("mm", torch.quantize_per_tensor(a, 0.1, 0, torch.qint8), b)),
    "nested": (nothing, lambda a, b: arguments("mm", torch.nested.nested_tensor([a]), b)),
    "meta": (nothing, lambda a, b: arguments("mm", a.to("meta"), b.to("meta"))),
    "another device": (nothing, lambda a, b: arguments("mm", a, b.to("meta"))),
    "subclass": (nothing, lambda a, b: arguments("mm", a.as_subclass(Marked), b)),
    "fake": (nothing, lambda a, b: arguments("mm", torch._subclasses.FakeTensorMode().from_tensor(a), b)),
    "functional": (nothing, lambda a, b: arguments("mm", torch._to_functional_tensor(a), b)),
    "no tensor": (nothing, lambda a, b: arguments("mm", a, [1.0])),
    "empty": (nothing, lambda a, b: arguments("mm", a[:0], b)),
    "requires grad": (nothing, lambda a, b: arguments("mm", a.requires_grad_(), b)),
    "an operand of the epilogue requires grad": (
        nothing,
        lambda a, b: arguments("mm", a, b, epilogue=relu_of_sum, epilogue_args=(torch.ones(6).requires_grad_(),)),
    ),
    "out requires grad": (nothing, lambda a, b: arguments("mm", a, b, out=torch.empty(5, 6).requires_grad_())),
    "dual": (forward_ad.dual_level, lambda a, b: arguments("mm", forward_ad.make_dual(a, a), b)),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), plain),
    "dispatch mode": (Passing, plain),
    "function mode": (PassingFunctions, plain),
    "profiler": (lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), plain),
    "alpha is a tensor": (nothing, lambda a, b: arguments("addmm", a, b, torch.ones(6), scalars=(torch.ones(()), 1))),
    "alpha is a truth value": (nothing, lambda a, b: arguments("addmm", a, b, torch.ones(6), scalars=(True, 1))),
    "alpha is too large": (nothing, lambda a, b: arguments("addmm", a, b, torch.ones(6), scalars=(10**400, 1))),
    "alpha overflows float32": (nothing, lambda a, b: arguments("addmm", a, b, torch.ones(6), scalars=(1e39, 1))),
    "beta is not finite": (nothing, lambda a, b: arguments("addmm", a, b, torch.ones(6), scalars=(1, float("nan")))),
    "operands without an epilogue": (nothing, lambda a, b: arguments("mm", a, b, epilogue_args=(a,))),
    "an epilogue that reads the world": (nothing, lambda a, b: arguments("mm", a, b, epilogue=unreadable)),
    "epilogue_args is a set": (nothing, lambda a, b: arguments("mm", a, b, epilogue=torch.relu, epilogue_args=set())),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_calls_are_left_to_python(case: str) -> None:
    within, make = UNUSUAL[case]
    a, b = operands()
    kept(arguments("mm", a, b))
    kept(arguments("addmm", a, b, torch.ones(6), scalars=(1, 1)))
    with within():
        assert found(make(a, b)) is None
    a = a.detach()
    assert found(arguments("mm", a, b)) is known_to_python(arguments("mm", a, b))


def test_transforms_and_traces_are_left_to_python() -> None:
    a, b = operands()
    entry = kept(arguments("mm", a, b))
    seen: list[object] = []

    def looked(x: Tensor) -> Tensor:
        seen.append(found(arguments("mm", x, b)))
        return gemmtune.mm(x, b)

    stacked = torch.stack([a, a])
    assert torch.allclose(torch.func.vmap(looked)(stacked), stacked @ b, atol=1e-5)
    torch.func.jvp(looked, (a,), (a,))
    torch.func.functionalize(looked)(a)
    torch.jit.trace(looked, (a,), check_trace=False)
    assert seen == [None] * len(seen)
    assert len(seen) >= 4
    assert found(arguments("mm", a, b)) is entry
    compiled = torch.compile(lambda x, y: gemmtune.mm(x, y), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(a, b), a @ b, atol=1e-5)


def test_serves_calls_without_wanted_gradients() -> None:
    a, b = operands()
    a.requires_grad_()
    with torch.no_grad():
        assert kept(arguments("mm", a, b))
        assert not run(arguments("mm", a, b)).requires_grad
    with torch.inference_mode():
        assert found(arguments("mm", a, b))
        assert run(arguments("mm", a, b)).is_inference()
    gemmtune.mm(a, b).sum().backward()
    assert a.grad is not None


def test_out_bumps_its_version_and_may_not_overlap() -> None:
    a, b = operands(4, 4, 4)
    out = torch.empty(4, 4)
    assert kept(arguments("mm", a, b, out=out))
    before = out._version
    assert gemmtune.mm(a, b, out=out) is out
    assert out._version == before + 1
    memory = torch.randn(8, 4)
    first, apart = memory[:4], memory[4:]
    assert gemmtune.mm(first, b, out=apart) is apart
    with pytest.raises(gemmtune.InvalidProblemError, match="shares memory"):
        gemmtune.mm(first, b, out=memory[2:6])
    with torch.inference_mode():
        inferred = torch.empty(4, 4)
        assert found(arguments("mm", a, b, out=inferred))
        gemmtune.mm(a, b, out=inferred)
    assert found(arguments("mm", a, b, out=inferred)) is None


def test_a_small_result_can_be_resized_and_shared() -> None:
    a, b = operands()
    kept(arguments("mm", a, b))
    result = gemmtune.mm(a, b)
    want = a @ b
    assert result.data_ptr() % 64 == 0
    assert torch.allclose(result.clone(), want, atol=1e-5)
    view = result.t()
    del result
    assert torch.allclose(view, want.t(), atol=1e-5)
    fresh = gemmtune.mm(a, b)
    fresh.resize_(100, 100).zero_()
    assert torch.equal(fresh, torch.zeros(100, 100))


def test_forgotten_plans_are_not_found() -> None:
    call = arguments("mm", *operands())
    entry = kept(call)
    lookup.keep(native.generation - 1, entry, call)
    forget_plans()
    assert native.module.count() == 0
    assert found(call) is False
    lookup.keep(native.generation - 1, entry, call)
    assert found(call) is False
    assert kept(call) is not entry


def test_settings_have_plans_of_their_own() -> None:
    call = arguments("mm", *operands())
    entry = kept(call)
    with settings.patch(search="quick"):
        assert found(call) is False
        assert kept(call) is not entry
        with settings.patch(native=False):
            assert kept(call) is False
    assert found(call) is entry


def test_deterministic_algorithms_have_plans_of_their_own() -> None:
    call = arguments("mm", *operands())
    kept(call)
    torch.use_deterministic_algorithms(True)
    try:
        assert found(call) is False
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_unkept_call_reaches_python_with_all_arguments() -> None:
    a, b = operands()
    kept(arguments("mm", a, b))
    missing = torch.ones(4, 3)
    assert torch.equal(native.module.look_up(*arguments("mm", a, missing)), a @ missing)


def test_threads_forget_and_patch_while_others_call() -> None:
    pairs = [operands(m, 8, n) for m in (2, 3) for n in (4, 5)]
    wants = [a @ b for a, b in pairs]
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for i in range(120):
                which = (number + i) % len(pairs)
                with settings.patch(**BY_TORCH, search="quick" if number % 3 == 0 else "default"):
                    got = gemmtune.mm(*pairs[which])
                    out = gemmtune.mm(*pairs[which], out=torch.empty_like(got))
                if not (torch.allclose(got, wants[which], atol=1e-5) and torch.equal(got, out)):
                    wrong.append((number, i))
                if number == 0 and i % 10 == 0:
                    forget_plans()
        except BaseException as error:  # noqa: BLE001 - told by the test
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_and_other_numbers_of_threads() -> None:
    a, b = operands(64, 64, 64)
    kept(arguments("mm", a, b))
    want = gemmtune.mm(a, b)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(gemmtune.mm(a, b), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.allclose(gemmtune.mm(a, b), want, atol=1e-4)
    finally:
        torch.set_num_threads(before)


EPILOGUES = (None, torch.relu, torch.tanh, lambda acc: acc * 2, lambda acc: acc * 2.0, lambda acc: acc + True)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Arguments, bool, str | None]:
    """Return a call, a flag that disables gradients, and a setting. A setting of None drops all plans before the call."""
    name = draw(st.sampled_from(["mm", "addmm", "bmm", "baddbmm"]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    m, k, n = (draw(st.integers(1, 2)) for _ in range(3))
    batch = (2,) if "b" in name.replace("addmm", "mm") else ()
    read = [operand(draw, (*batch, *size), dtype) for size in ((m, k), (k, n))]
    if "add" in name:
        read.append(operand(draw, draw(st.sampled_from([(n,), (m, n), (1, 1), ()])), dtype))
    scalars = draw(st.tuples(*[st.sampled_from([0, 1, 1.0, 2, 2.5, -(2.0**62), 1e39, math.inf])] * 2)) if "add" in name else ()
    epilogue = draw(st.sampled_from(EPILOGUES))
    out = operand(draw, (*batch, m, n), dtype) if draw(st.booleans()) else None
    if draw(st.integers(0, 5)) == 0:
        read[0].requires_grad_()
    call = arguments(name, *read, out=out, epilogue=epilogue, scalars=scalars)
    return call, draw(st.booleans()), draw(st.sampled_from([None, "quick", "exhaustive"]))


def operand(draw: st.DrawFn, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw a tensor of a size, optionally transposed or with gaps, at any element offset within 16 bytes."""
    transposed = len(size) > 1 and draw(st.booleans())
    given_size = (*size[:-2], size[-1], size[-2]) if transposed else size
    gap, offset = draw(st.integers(0, 1)), draw(st.integers(0, 3))
    wide = (*given_size[:-1], given_size[-1] + gap) if given_size else ()
    memory = torch.ones(torch.Size(wide).numel() + offset).to(dtype)
    x = memory[offset:].view(wide)
    x = x[..., : given_size[-1]] if given_size else x
    return x.transpose(-1, -2) if transposed else x


@given(st.lists(calls(), min_size=2, max_size=6))
@hypothesis_settings(max_examples=40)
def test_native_and_python_find_the_same_plan(drawn: list[tuple[Arguments, bool, str | None]]) -> None:
    for call, without_grad, search in drawn:
        if search is None:
            forget_plans()
        with settings.patch(search=search or "default"), torch.set_grad_enabled(not without_grad):
            agree(call)
            with contextlib.suppress(gemmtune.InvalidProblemError):  # out and an operand that wants a gradient
                run(call)
                run(call)
                agree(call)
                if found(call) is False:
                    assert known_to_python(call) is None


def agree(call: Arguments) -> None:
    """Check that the native look-up and Python's table find the same entry."""
    entry = found(call)
    assert not entry or entry is known_to_python(call)


def test_capture_of_keys_holds_python_objects_alive() -> None:
    a, b = operands()

    def made(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda acc: acc * factor

    for factor in (2.0, 3.0, 2.0):
        call = arguments("mm", a, b, epilogue=made(factor))
        entry = kept(call)
        assert torch.allclose(run(arguments("mm", a, b, epilogue=made(factor))), (a @ b) * factor, atol=1e-4)
        assert found(arguments("mm", a, b, epilogue=made(factor))) is entry


def test_wrong_use_is_an_error() -> None:
    a, b = operands()
    right = arguments("mm", a, b)
    for wrong in (right[:1], right[:7], (*right[:4], None, *right[5:]), (*right[:5], [], *right[6:]), (*right, *[a] * 11)):
        with pytest.raises(TypeError, match="expected"):
            native.module.look_up(*wrong)
    with pytest.raises(gemmtune.InvalidProblemError):
        gemmtune.mm(torch.ones(2, 3), torch.ones(2, 3))


def test_a_failed_build_is_logged_once_and_python_serves(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(native, "call", None)
    monkeypatch.setattr(native, "begun", False)
    monkeypatch.setattr(build, "make", lambda: (_ for _ in ()).throw(gemmtune.errors.UnavailableError("no headers")))
    lookup.load(path.FOR_NATIVE)
    assert native.call is None
    assert native.state == "failed: no headers"
    assert "no headers" in caplog.text
    a, b = operands()
    assert torch.allclose(gemmtune.mm(a, b), a @ b, atol=1e-5)
    native.state = "in use"


def test_an_unusable_cache_folder_fails_no_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(native, "call", None)
    monkeypatch.setattr(native, "begun", False)
    a, b = operands(9, 9, 9)
    with settings.patch(cache_dir=str(tmp_path / "file"), tune="never"):
        assert torch.allclose(gemmtune.mm(a, b), a @ b, atol=1e-5)
        assert "no temporary folder can be used instead" in str(build.why_impossible())
    assert native.call is None


def test_a_compiler_of_the_module_ends_with_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is in the group of a worker process, which ends when its parent does, however that ends."""
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho group $(ps -o pgid= -p $$) >&2; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(build, "why_impossible", lambda: None)
    monkeypatch.setattr(build, "find_compiler", lambda: Compiler(path=str(tool), version="1"))
    with settings.patch(cache_dir=str(tmp_path / "cache")), pytest.raises(gemmtune.errors.CompileError) as caught:
        build.make(quietly=True)
    found = re.search(r"group (\d+)", str(caught.value))
    assert found is not None, str(caught.value)
    assert int(found[1]) != os.getpgid(0)
    assert not list((tmp_path / "cache/native").glob("tmp*"))


def test_the_background_build_waits_and_installs_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "call", None)
    monkeypatch.setattr(native, "begun", False)
    monkeypatch.setattr(lookup, "QUIET_S", 0.05)
    monkeypatch.setattr(build, "made", lambda: None)
    gemmtune.mm(*operands(7, 7, 7))
    for thread in threading.enumerate():
        if thread.name == "gemmtune-native":
            thread.join(60)
    assert native.state == "in use"
    assert native.call is not None
