"""Adapters of GEMMs that compile for each size: which kernels are reported, and how compilation is kept short."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gemmtune.conformance.bench.outcome import CaseStatus
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.runs.isolation import judge

CASE = Case(property_name="integers", dtype="float16", m=16, n=16, k=16)
GENERATED = """
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
# Topologically Sorted Source Nodes: [mm], Original ATen: [aten.mm]
triton_tem_fused_mm_0 = async_compile.triton('triton_tem_fused_mm_0', '''
@triton_heuristics.template(
    num_stages=3,
    num_warps=8,
)
def triton_tem_fused_mm_0(arg_A, arg_B, out_ptr0):
    BLOCK_M : tl.constexpr = 64
    BLOCK_N : tl.constexpr = 128
    BLOCK_K : tl.constexpr = 32
''', device_str='cuda')
triton_per_fused_add_1 = async_compile.triton('triton_per_fused_add_1', '''
@triton_heuristics.persistent_reduction(num_stages=1)
''')
"""


@pytest.fixture(scope="module")
def inductor() -> ModuleType:
    """Import the adapter in the tests that need it only, since it imports half of torch."""
    return importlib.import_module("adapters.inductor")


class TestInductor:
    def test_kernels_in_generated_code_are_named_with_their_tiles(self, inductor: ModuleType) -> None:
        assert inductor.generated_kernels(GENERATED) == [
            "triton_tem_fused_mm_0 64x128x32, 3 stages, 8 warps",
            "triton_per_fused_add_1",
        ]
        assert inductor.library_calls(GENERATED) == []

    def test_library_calls_are_reported(self, inductor: ModuleType) -> None:
        code = "        extern_kernels.mm(a, b, out=c)\n        d = torch.ops.aten.bmm.dtype(a, b)\n        extern_kernels.mm(c, b)"
        assert inductor.library_calls(code) == ["extern_kernels.mm", "torch.ops.aten.bmm.dtype"]

    def test_a_case_left_to_aten_is_refused_each_time(self, inductor: ModuleType) -> None:
        subject = inductor.CompiledSubject(
            "aten", inductor.static.traits.changed({"devices": ["cpu"]}), dynamic=False, backends="ATEN"
        )
        for _ in range(2):
            outcome = judge(subject, CASE, torch.device("cpu"))
            assert outcome.status is CaseStatus.REFUSED
            assert outcome.reason == "not possible here: Inductor generates no kernel for this, but calls extern_kernels.mm"

    def test_refuses_without_a_kernel_to_choose(self, inductor: ModuleType) -> None:
        outcome = judge(inductor.static, CASE, torch.device("cpu"))
        assert outcome.status is CaseStatus.REFUSED
        assert outcome.reason == "not possible here: Inductor has no Triton kernel to choose from"


class Tuner:
    """A tuner like FlagGems': its policy gets the configs and a timing function."""

    def policy(self, bench, configs, args, kwargs):
        raise AssertionError("it would time every config")

    def run(self, *args: object) -> str:
        config, times = self.policy(lambda config: [float("inf") if config.startswith("too big") else 1.0] * 3, CONFIGS, args, {})
        assert list(times) == [config]
        return config


CONFIGS = ["64x64", "too big", "128x64", "128x128"]


@pytest.fixture
def flag_gems(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the adapter with a fake FlagGems package."""
    tuner = Tuner()
    package = ModuleType("flag_gems")
    package.mm = lambda a, b: (a @ b, tuner.run(a, b, *a.shape, *b.shape))  # type: ignore[attr-defined]
    library = ModuleType("flag_gems.utils.libentry")
    library.LibTuner = SimpleNamespace(get=lambda name: Tuner)  # type: ignore[attr-defined]
    for name, module in (
        ("flag_gems", package), ("flag_gems.utils", ModuleType("flag_gems.utils")), ("flag_gems.utils.libentry", library),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    name = "adapters.flag_gems_ops"
    before = sys.modules.pop(name, None)
    adapter = importlib.import_module(name)
    sys.modules.pop(name)
    if before is not None:
        sys.modules[name] = before
    return adapter


def test_flag_gems_untuned_runs_one_compiling_config(flag_gems: ModuleType) -> None:
    sizes = [(torch.ones(m, 3), torch.ones(3, 2)) for m in range(1, 60)]
    ran = [flag_gems.untuned.mm(a, b)[1] for a, b in sizes]
    assert set(ran) == {"64x64", "128x64", "128x128"}
    assert [flag_gems.untuned.mm(a, b)[1] for a, b in sizes] == ran
    with pytest.raises(AssertionError, match="it would time every config"):
        flag_gems.dense.mm(*sizes[0])
