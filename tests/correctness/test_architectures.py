"""The architecture matrix: its problems, its findings, how it runs kernels, and its reports. No GPU is needed."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted_choices import BF16, CLAIMS, CPU, Opaque, Rewritten, Segfaulting, planted, simple, triton_choice
from rotation import rotated

from gemmtune import settings
from gemmtune.architectures import (
    ARCHITECTURES,
    Inspection,
    MatrixReport,
    Ran,
    Runner,
    Way,
    compile_and_inspect,
    how_to_run,
    inspect_choices,
    matrix_choices,
    matrix_problems,
    run_matrix,
)
from gemmtune.architectures.inspection import faults
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.padding import PaddedChoice
from gemmtune.choice import Availability, Offers, Status
from gemmtune.device import DeviceInfo, preset
from gemmtune.errors import UnavailableError
from gemmtune.problem.dtypes import FLOAT8_FNUZ
from gemmtune.problem.problem import Problem
from gemmtune.selector.samples import Sample
from gemmtune.toolchain.compiled import Artifact, CompiledChoice, cubin_usage
from gemmtune.toolchain.triton_kernels import initialise, use_ptx

pytest.importorskip("triton", reason="compiles with Triton")
pytestmark = pytest.mark.rotates(8)

FEW = {name: matrix_problems()[name] for name in ("mm-bf16-nt", "mm-f32-nt", "baddbmm-f64-tt")}


class TestProblems:
    def test_every_operation_with_every_dtype_and_layout(self) -> None:
        seen = Counter((p.op, p.dtype_label, p.layout_letters) for p in matrix_problems().values())
        labels = ("bfloat16", "float16", "float32", "tf32", "float64")
        for combination in itertools.product(("mm", "addmm", "bmm", "baddbmm"), labels, ("nn", "nt", "tn", "tt")):
            assert seen[combination] >= 1, combination

    def test_all_biases_scalars_and_epilogues_occur(self) -> None:
        problems = matrix_problems().values()
        assert {len(p.inp.size) for p in problems if p.inp} == {0, 1, 2, 3}
        assert {(p.alpha, p.beta) for p in problems if p.inp} >= {("general", "general"), ("one", "one"), ("one", "zero")}
        assert sum(p.epilogue is not None for p in problems) == 3

    def test_quantized_operations_have_every_scale_dtype_and_encoding(self) -> None:
        problems = matrix_problems().values()
        weights = [p for p in problems if p.op == "mixed_mm"]
        assert {(p.b.dtype, p.encoding) for p in weights} >= {
            (torch.int8, ""), (torch.uint8, ""), (torch.float8_e4m3fn, ""), (torch.uint8, "int4"), (torch.uint8, "uint4"),
        }  # fmt: skip
        assert {p.scale_block("scale_b")[0] for p in weights if p.scale_b} >= {32, 64, 128, 4096}
        assert {len(p.scales) for p in weights} == {0, 1, 2}
        assert {p.m for p in weights if p.zero_b} == {16}
        assert {p.scale_block("scale_b") for p in problems if p.op == "scaled_mm"} >= {(128, 1), (128, 128)}
        pairs = {(p.a.dtype, p.b.dtype) for p in problems if p.op == "scaled_mm"}
        assert pairs >= set(itertools.product(FLOAT8_FNUZ, repeat=2))


class TestChoices:
    @pytest.mark.turn(0, 8)
    @pytest.mark.parametrize("arch", ARCHITECTURES)
    def test_each_compilation_occurs_once_grouped_by_problem(self, arch: str) -> None:
        problems = dict(rotated(list(matrix_problems().items()), 19, arch))
        choices = matrix_choices(arch, "quick", problems=problems)
        served = sum(
            (p.op != "mixed_mm" or arch != "sm75") and (arch == "gfx942" or p.a.dtype not in FLOAT8_FNUZ) for p in problems.values()
        )
        assert len(choices) > 6 * served
        assert len({choice.compile_key for choice in choices}) == len(choices)
        assert {choice.arch for choice in choices} == {arch}
        groups = [problem for problem, _ in itertools.groupby(choices, key=lambda choice: choice.problem)]
        assert len(groups) == len(set(groups))

    def test_a_sample_has_the_first_and_the_last_of_each_problem(self) -> None:
        every, few = (matrix_choices("sm80", "quick", problems=FEW, most=most) for most in (None, 2))
        assert len(few) == 2 * len(FEW)
        assert (few[0], few[1]) == (every[0], [c for c in every if c.problem == every[0].problem][-1])

    def test_an_unknown_architecture_names_the_known_ones(self) -> None:
        with pytest.raises(UnavailableError, match="arch: got 'sm70', expected one of sm75, sm80"):
            matrix_choices("sm70")

    def test_settings_without_a_template_raise(self) -> None:
        with settings.patch(backends=("aten",)), pytest.raises(UnavailableError, match="no enabled backend compiles kernels"):
            matrix_choices("sm80")


@pytest.mark.turn(1, 8)
@pytest.mark.parametrize("arch", rotated(["sm75", "sm80", "sm90", "sm100"], 4, "clean"))
def test_the_matrix_of_a_few_choices_is_clean(arch: str) -> None:
    stages: list[tuple[str, int, int]] = []
    listener = SimpleNamespace(stage=lambda *moved: stages.append(moved))
    report = run_matrix(arch, search="quick", problems=FEW, most=1, progress=listener)  # type: ignore[arg-type]
    assert report.failures == ()
    assert report.executed == len(report.inspections) == len(FEW)
    assert stages[-1] == (f"{arch} compile", 3, 3)
    assert all(i.instructions and i.expected and i.registers and i.stack_bytes is not None for i in report.inspections)
    json.dumps(report.as_json())


class TestPlantedFaults:
    """Kernels with one fault each, which the matrix must report."""

    @pytest.mark.turn(4, 8)
    @pytest.mark.parametrize(
        ("choice", "found"),
        [
            (triton_choice("sm75", Config(block_m=64, block_n=64, block_k=16, stages=1, warps=1)), "bytes of a thread spilled"),
            (triton_choice("sm80", Config(block_m=128, block_n=256, block_k=128, stages=3, warps=8)), "a block has 166912"),
            (
                planted(Rewritten, "sm80", old="(a_block, b_block", new="(a_block.to(tl.float32), b_block.to(tl.float32)"),
                "expected mma.sync.aligned.m*n*k*.row.col.f32.bf16.bf16.f32, found fma.rn.f32",
            ),
            (
                planted(Rewritten, "sm90", old="(a_block, b_block", new="(a_block.to(tl.float16), b_block.to(tl.float16)"),
                "expected wgmma.mma_async.sync.aligned.m64n*k*.f32.bf16.bf16, "
                "found wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
            ),
        ],
        ids=["spills", "shared-memory", "no-tensor-core", "another-input-type"],
    )
    def test_a_kernel_that_compiles(self, choice: TritonChoice, found: str) -> None:
        inspection = compile_and_inspect(choice)
        assert inspection.status is Status.OK
        assert any(found in text for text in inspection.problems), inspection.problems

    def test_compilations_that_fail_or_crash_do_not_affect_the_others(self) -> None:
        good = triton_choice("sm80")
        broken = planted(Rewritten, "sm80", old="tl.dot(", new="tl.no_such_function(")
        crash = planted(Segfaulting, "sm80", Config(block_m=32, block_n=32, block_k=64, stages=2, warps=4))
        inspections = list(inspect_choices([broken, crash, good]))
        assert [i.status for i in inspections] == [Status.COMPILE_ERROR, Status.CRASHED, Status.OK]
        assert "no_such_function" in inspections[0].problems[0]
        assert "SIGSEGV" in inspections[1].problems[0]
        assert inspections[2].problems == ()

    def test_an_unreadable_binary_is_a_finding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(cubin: bytes, tool: object) -> None:
            raise RuntimeError("cuobjdump: exit status 1")

        monkeypatch.setattr("gemmtune.backends.triton.artifact.cubin_usage", refuse)
        inspection = compile_and_inspect(triton_choice("sm80"))
        assert inspection.status is Status.RUNTIME_ERROR
        assert inspection.problems == ("runtime_error: cuobjdump: exit status 1",)

    GOOD = Artifact(
        kernel="k", threads=128, shared_bytes=90000, registers=128, stack_bytes=0, code="mma.sync.aligned.m16n8k16.bf16",
        expected="mma.sync*.bf16", predicted_bytes=100000, slack_bytes=0,
    )  # fmt: skip

    @pytest.mark.parametrize(
        ("changes", "found"),
        [
            ({}, None),
            ({"registers": None, "stack_bytes": None}, None),
            ({"stack_bytes": 128, "spilled_share": 0.5}, None),
            ({"stack_bytes": 129, "spilled_share": 0.125}, None),
            ({"stack_bytes": 129, "spilled_share": 0.13}, "129 bytes of a thread spilled, 13% of the main loop's instructions"),
            ({"registers": 255, "threads": 512}, "512 threads of 255, a multiprocessor has 65536"),
            ({"shared_bytes": 100001}, "100001 bytes, predicted at most 100000"),
            ({"shared_bytes": 60000}, "60000 bytes, but 100000 predicted: too loose"),
            ({"shared_bytes": 60000, "slack_bytes": 100000}, None),
            ({"shared_bytes": 60000, "slack_bytes": None}, None),
            ({"shared_bytes": 170000, "predicted_bytes": 170000}, "takes 170000 bytes of shared memory, a block has 166912"),
            ({"code": "add.f32"}, "expected mma.sync*.bf16, found none that multiplies"),
            ({"code": "mma.sync.bf16; mma.sync.f16"}, "no matrix instruction but mma.sync*.bf16, found mma.sync.f16 too"),
            ({"code": "mma.sync.bf16; fma.rn.f32"}, None),
            ({"expected": None}, "expected none that multiplies, found mma.sync.aligned.m16n8k16.bf16"),
        ],
        ids=str,
    )
    def test_an_artifact(self, changes: dict[str, Any], found: str | None) -> None:
        texts = list(faults(replace(self.GOOD, **changes), preset("sm80")))
        assert len(texts) == (found is not None), texts
        assert found is None or found in texts[0]

    def test_an_invalid_cubin(self, tmp_path: Any) -> None:
        import triton

        tool = tmp_path.__class__(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        if not tool.exists():
            pytest.skip("this Triton has no cuobjdump")
        with pytest.raises(RuntimeError, match=r"cuobjdump -res-usage .*: exit status"):
            cubin_usage(b"nothing of the kind", tool)


H200 = replace(preset("sm90"), name="NVIDIA H200")


@pytest.mark.parametrize(
    ("arch", "device", "mode", "reason"),
    [
        ("sm90", H200, "native", ""),
        ("sm80", H200, "forward", ""),
        ("sm75", H200, "forward", ""),
        ("sm80", preset("sm86"), "forward", ""),
        ("sm75", preset("sm75"), "native", ""),
        ("sm100", H200, None, "NVIDIA H200 is sm90, which is older than sm100"),
        ("sm90", preset("sm75"), None, "Tesla T4 is sm75, which is older than sm90"),
        ("sm90", preset("sm100"), None, "sm90 uses instructions of its own (PTX target sm_90a), which run on sm90 alone"),
        ("sm90", preset("sm120"), None, "which run on sm90 alone"),
        ("sm80", None, None, "no GPU here: sm80 was compiled for and not run"),
        ("sm80", CPU, None, "no GPU here"),
        ("gfx942", None, None, "no GPU here"),
        ("gfx942", preset("gfx942"), "native", ""),
        ("gfx90a", preset("gfx942"), None, "HIP kernels run on one architecture only"),
        ("sm80", preset("gfx942"), None, "HIP kernels run on one architecture only"),
        ("gfx942", H200, None, "HIP kernels run on one architecture only"),
    ],
    ids=lambda x: x.arch if isinstance(x, DeviceInfo) else None,
)
def test_how_to_run(arch: str, device: DeviceInfo | None, mode: str | None, reason: str) -> None:
    way = how_to_run(arch, device)
    assert way.mode == mode
    assert reason in way.reason
    assert bool(way.reason) == (mode is None)


class FakeDriver:
    """Triton's driver of a machine with a GPU of sm90, as far as loading a kernel needs it. It records loaded binaries."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, bytes, int, int]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.utils = SimpleNamespace(load_binary=self.load_binary)

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return SimpleNamespace(warp_size=32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return SimpleNamespace(
            launch=lambda *args: self.launched.append(args), launch_cooperative_grid=False, launch_pdl=False,
            global_scratch_size=0, profile_scratch_size=0, arg_annotations=(), kernel_signature=b"",
        )  # fmt: skip

    def load_binary(self, name: str, data: bytes, shared: int, device: int) -> tuple[str, str, int, int, int]:
        self.loaded.append((name, data, shared, device))
        return "module", f"function of {name}", 128, 0, 1024


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr("triton.compiler.compiler.driver", SimpleNamespace(active=fake))
    monkeypatch.setattr("triton.compiler.compiler.max_shared_mem", lambda device: 232448)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr("gemmtune.toolchain.triton_kernels._loaded", {})
    return fake


class TestForward:
    """Kernels for an older architecture, loaded from their PTX."""

    @pytest.mark.parametrize("arch", ["sm75", "sm80"])
    def test_ptx_is_loaded_in_place_of_the_cubin(self, driver: FakeDriver, arch: str) -> None:
        config = Config(block_m=32, block_n=32, block_k=32, stages=1, warps=4)
        choice = triton_choice(arch, config)
        native, forward = choice.build(), choice.forward().build()
        compiled = choice.kernels[0].compile()
        (name, cubin, *_), (same_name, text, shared, device) = driver.loaded
        assert name == same_name == compiled.metadata.name
        assert cubin == compiled.asm["cubin"]
        assert text.decode() == compiled.asm["ptx"] + "\0"
        assert f".target sm_{arch[2:]}\n" in text.decode()
        assert (shared, device) == (compiled.metadata.shared, 0)
        a, b, out = (SimpleNamespace(data_ptr=lambda i=i: 4096 * i) for i in range(1, 4))
        for kernel in (native, forward):
            kernel.run(out, (a, b), ())  # type: ignore[arg-type]
        assert driver.launched[0] == driver.launched[1]
        assert {4096, 8192, 12288, f"function of {name}"} <= {x for x in driver.launched[1] if isinstance(x, (int, str))} | {
            x for group in driver.launched[1] if isinstance(group, tuple) for x in group
        }

    def test_a_forward_choice_can_be_pickled_and_keeps_its_compilation(self) -> None:
        choice = triton_choice("sm80")
        forward = pickle.loads(pickle.dumps(choice.forward()))
        assert (forward.compile_key, forward.content_hash, forward.arch) == (choice.compile_key, choice.content_hash, "sm80")
        assert forward.from_ptx
        assert not choice.from_ptx

    @pytest.mark.turn(3, 8)
    def test_padded_choices_load_both_kernels_from_ptx(self, driver: FakeDriver) -> None:
        problem = Problem.mm(300, 301, 299, device_type="cuda")
        padded = [c for c in matrix_choices("sm80", "quick", problems={"odd": problem}) if isinstance(c, PaddedChoice)]
        padded[0].forward().build()
        assert len(driver.loaded) == 2
        assert all(data.endswith(b"\0") and b".target sm_80\n" in data for _, data, _, _ in driver.loaded)

    def test_ptx_for_a_single_architecture_is_refused(self, driver: FakeDriver) -> None:
        with pytest.raises(UnavailableError, match="got PTX for sm_90a, expected one without a suffix"):
            triton_choice("sm90").forward().build()
        assert driver.loaded == []

    def test_a_loaded_kernel_is_refused(self, driver: FakeDriver) -> None:
        compiled = triton_choice("sm80").kernels[0].compile()
        initialise(compiled)
        with pytest.raises(UnavailableError, match="expected a kernel that loads its cubin and is not loaded yet"):
            use_ptx(compiled)

    def test_a_kernel_without_ptx_is_refused(self) -> None:
        compiled = triton_choice("sm80").kernels[0].compile()
        del compiled.asm["ptx"]
        with pytest.raises(UnavailableError, match="expected ptx too; unset TRITON_STORE_BINARY_ONLY"):
            use_ptx(compiled)


def verdict_of(choice: CompiledChoice, device: DeviceInfo) -> Sample:
    with Runner(device) as runner:
        return runner.run(choice)


class TestRunning:
    def test_kernels_that_cannot_run_here_are_refused(self) -> None:
        with pytest.raises(UnavailableError, match="triton:mm_64x64x64_s3_w4: no GPU here"):
            verdict_of(triton_choice("sm80"), CPU)

    @pytest.fixture
    def _native(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the CPU stand for the requested GPU."""
        monkeypatch.setattr("gemmtune.architectures.report.how_to_run", lambda arch, device: Way(mode="native"))

    @pytest.mark.usefixtures("_native")
    def test_verdicts(self) -> None:
        assert verdict_of(simple("right"), CPU).status is Status.OK
        wrong = verdict_of(simple("wrong"), CPU)
        assert wrong.status is Status.WRONG_RESULT
        assert "out[63, 47]" in wrong.reason
        raised = verdict_of(simple("raise"), CPU)
        assert (raised.status, raised.reason) == (
            Status.RUNTIME_ERROR,
            "RuntimeError: an illegal memory access was encountered",
        )

    @pytest.mark.usefixtures("_native")
    def test_a_crash_or_an_exception_costs_one_choice_and_the_process(self) -> None:
        with Runner(CPU) as runner:
            statuses = [runner.run(simple(how)).status for how in ("right", "segfault", "raise", "wrong", "right")]
        assert statuses == [Status.OK, Status.CRASHED, Status.RUNTIME_ERROR, Status.WRONG_RESULT, Status.OK]

    def test_forward_builds_the_forward_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gemmtune.architectures.report.how_to_run", lambda arch, device: Way(mode="forward"))
        assert verdict_of(simple("right"), CPU).status is Status.OK
        assert verdict_of(simple("forwarded"), CPU).status is Status.WRONG_RESULT


def _inspection(**changes: Any) -> Inspection:
    base = Inspection(
        choice="triton:mm_a", backend="triton", problem=str(BF16), arch="sm80", status=Status.OK, shared_bytes=2048, registers=96,
        stack_bytes=0, instructions=(("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 8),), expected=("mma.sync*",),
    )  # fmt: skip
    return replace(base, **changes)


def _report(**changes: Any) -> MatrixReport:
    base = MatrixReport(
        arch="sm80", search="quick", toolchains=("triton 3.6.0",), problems=1, left_out=(), inspections=(_inspection(),),
        way=how_to_run("sm80", H200), device="NVIDIA H200 (sm90)", run=False, ran=(), seconds=1.25,
    )  # fmt: skip
    return replace(base, **changes)


RIGHT = Ran(choice="triton:mm_a", problem="mm", result=Sample(status=Status.OK, error_over_bound=0.1))
WRONG = Ran(
    choice="triton:mm_b", problem="mm", result=Sample(status=Status.WRONG_RESULT, error_over_bound=9, reason="out[0, 0] = 1")
)
LARGE = Ran(choice="triton:mm_c", problem="mm", result="needs 170000 bytes of shared memory, a block of sm86 has 101376")


class TestReport:
    def test_a_clean_report(self) -> None:
        assert _report().text().splitlines() == [
            "sm80: 1 kernel of 1 problem, search quick (triton 3.6.0), 1.2 s",
            "  compiled      1 of 1",
            "  resources     shared memory up to 2048 bytes, registers up to 96, 0 kernels with a stack",
            "  instruction   mma.sync.aligned.row.col.f32.bf16.bf16.f32: 1 kernel",
            "  run           not asked for: NVIDIA H200 (sm90) can, from PTX for sm80",
            "  0 failures",
        ]

    def test_failures_of_compilation_and_of_running(self) -> None:
        bad = _inspection(
            choice="triton:mm_z", status=Status.CRASHED, shared_bytes=None, registers=None, stack_bytes=None, instructions=(),
            expected=(), problems=("crashed: SIGSEGV\nin ptxas",),
        )  # fmt: skip
        report = _report(inspections=(_inspection(stack_bytes=64, spilled_share=0.03), bad), run=True, ran=(RIGHT, WRONG, LARGE))
        assert report.executed == 3
        assert len(report.failures) == 2
        text = report.text()
        assert "compiled      1 of 2, 1 crashed" in text
        assert "1 kernel with a stack (up to 64 bytes and 3% of the main loop)" in text
        assert "run           1 of 2 right on NVIDIA H200 (sm90), from PTX for sm80; 1 kernel left out: not enough" in text
        assert f"- triton:mm_z for {BF16} on sm80: crashed: SIGSEGV\n    in ptxas" in text
        assert "triton:mm_b for mm, sm80 on NVIDIA H200 (sm90): wrong_result: out[0, 0] = 1" in text
        data = json.loads(json.dumps(report.as_json()))
        assert (data["executed"], len(data["failures"]), data["ran"][2]["verdict"]) == (3, 2, LARGE.result)

    def test_a_requested_run_that_cannot_happen_is_a_failure(self) -> None:
        cannot = _report(way=how_to_run("sm80", None), device="")
        assert cannot.failures == ()
        assert "run           no: no GPU here: sm80 was compiled for and not run" in cannot.text()
        assert replace(cannot, run=True).failures == (
            "sm80 was to be run, but cannot be: no GPU here: sm80 was compiled for and not run",
        )

    def test_nothing_executed_is_a_failure(self) -> None:
        assert "no choice to compile" in _report(inspections=()).failures[0]
        assert "no kernel could be run" in _report(run=True, ran=(LARGE,)).failures[0]

    def test_everything_left_out_is_reported(self) -> None:
        assert "  left out      cutlass: no nvcc\n" in _report(left_out=("cutlass: no nvcc",)).text()

    def test_unread_resources_are_reported(self) -> None:
        assert "of 1 kernel were not read" in _report(inspections=(_inspection(registers=None, stack_bytes=None),)).text()


def test_a_required_run_without_a_gpu_fails_and_keeps_the_compilations() -> None:
    report = run_matrix("sm80", search="quick", problems={"one": BF16}, most=1, device=None, run=True)
    assert report.executed == 1
    assert [text for text in report.failures if "cannot be: no GPU here" in text] == list(report.failures)


def test_an_interpreting_triton_compiles_nothing_and_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnavailableError, match=r"sm80: no enabled backend compiles .*interpreter mode: unset TRITON_INTERPRET"):
        matrix_choices("sm80")


class OpaqueBackend:
    """Backend with the choices of Triton's, under a class without artifacts."""

    name = "triton"

    def available(self, device: DeviceInfo) -> Availability:
        return Availability(ok=True, detail="opaque 1.0")

    def serves_by_default(self, device: DeviceInfo) -> bool:
        return True

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: object) -> Offers:
        return Offers(choices=[Opaque(name=f"opaque:{i}", backend="triton", problem=problem, claims=CLAIMS) for i in range(2)])


def test_kernels_that_cannot_be_inspected_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gemmtune.architectures.matrix", "gemmtune.selector.offers"):
        monkeypatch.setattr(f"{module}.load", lambda name: OpaqueBackend())
    report = run_matrix("sm80", search="quick", problems={"one": BF16})
    assert report.left_out == ("triton: 2 kernels that cannot be inspected",)
    assert "no choice to compile" in report.failures[0]
