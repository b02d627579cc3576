"""``gemmtune export`` in formats of other tools, read by these tools."""

from __future__ import annotations

import importlib
import json
import re
from types import SimpleNamespace

import pytest
import torch
from extras import needs
from store_cases import row
from torch._inductor import config as inductor_config
from torch._inductor.lookup_table import LookupTableChoices
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

from gemmtune import Problem, cli, settings
from gemmtune.cli.spec import Spec
from gemmtune.cli.tunableop import entries_of, signature_of
from gemmtune.report.other_formats import inductor_table, key_of, moe_configs
from gemmtune.store.key import canonical
from gemmtune.store.row import Row
from gemmtune.store.store import open_store

GPU = {"device_type": "cuda"}
H200 = canonical({"device": "NVIDIA H200", "triton": "3.7.1", "timing": "graph"})


def measured(problem: Problem, *choices: tuple[str, float, dict], machine: str = H200, **fields: object) -> list[Row]:
    """Return rows of torch at 10 µs and of other choices, each a name, a time and its ``info``."""
    listed = [("aten:mm", 10.0, {}), *choices]
    return [
        row(i, key=problem.key, fingerprint=machine, name=name, time_us=us, info=info, baseline=i == 0, **fields)
        for i, (name, us, info) in enumerate(listed)
    ]


def tile(block_m: int, block_n: int, block_k: int, template: str = "mm", **more: object) -> dict:
    return {"template": template, "tile": [block_m, block_n, block_k], "group_m": 8, "warps": 4, "stages": 3, "splits": 1} | more


ATEN = {"template_id": "aten::mm"}


def test_inductor_entries_are_torchs_and_the_templates_that_beat_it():
    shape = {"layout": "nt", **GPU}
    problems = [Problem.mm(m, 64, 96, **shape) for m in (16, 32, 48)]
    faster = [(f"c{us}", us, tile(16, 64, 64, warps=warps)) for us, warps in ((9.0, 8), (6.0, 2), (7.0, 1), (5.0, 4))]
    rows = [
        *measured(problems[0], *faster, ("b", 4.0, tile(16, 64, 32, splits=2)), ("again", 5.5, tile(16, 64, 64))),
        *measured(
            problems[1],
            *((word, 5.0, tile(16, 64, 64, **{word: True})) for word in ("swap_ab", "pdl")),
            ("padded", 5.0, tile(16, 64, 64, padded=["a"])),
            ("d", 3.0, {"tile": [64, 64, 64], "cluster": 2}),
            ("slower", 10.5, tile(16, 64, 64)),
            ("larger than the rows", 5.0, tile(64, 64, 64)),
            ("larger than the columns", 5.0, tile(16, 128, 64)),
        ),
        *measured(problems[2], ("e", 5.0, tile(32, 64, 32))),
        *measured(Problem.addmm(4, 64, 96, **GPU), ("f", 5.0, tile(16, 64, 64))),
        *measured(Problem.mm(5, 64, 96, layout="nt", device_type="cpu")),
    ]
    table = inductor_table(rows)
    first, second, third = (table.pop(key_of(problem)) for problem in problems)
    assert not table, "a biased product, or one on a CPU, has no entry"
    options = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
    derived = {"EVEN_K": False, "ACC_TYPE": "tl.float32", "USE_FAST_ACCUM": False}
    assert first[:2] == [ATEN, {"template_id": "triton::mm", **derived, **options}], "torch's operation is first and wins a tie"
    assert [entry["num_warps"] for entry in first[1:]] == [4, 2, 1], "three, the fastest first, each once"
    assert second == [ATEN], "split-K, swapped or padded operands, overlap, clusters and larger tiles have no template"
    assert third[1]["EVEN_K"], "96 is whole blocks of 32"


def test_inductor_gets_every_entry_of_a_product():
    problem = Problem.mm(16, 64, 96, layout="nt", **GPU)
    table = inductor_table(measured(problem, *((f"{n}", 5.0, tile(16, n, 32)) for n in (16, 32, 64))))
    choices = Anywhere()
    choices.hits = []
    inputs = SimpleNamespace(
        device=lambda: torch.device("cpu"),
        dtypes=lambda: (torch.bfloat16,) * 2,
        shapes_hinted=lambda: ((16, 96), (96, 64)),
        strides_hinted=lambda: ((96, 1), (1, 96)),
        _scalars={},
    )
    with inductor_config.patch({"lookup_table.table": json.loads(json.dumps(table))}):
        found = choices.lookup_template_configs(inputs, "mm", ["aten::mm", "triton::mm", "triton::mm_persistent_tma"])
    assert list(found) == ["aten::mm", "triton::mm"]
    assert [entry["BLOCK_N"] for entry in found["triton::mm"]] == [16, 32, 64]


class Anywhere(LookupTableChoices):
    """Inductor's look-up, also on a machine without a GPU."""

    hits: list[str]

    @staticmethod
    def _get_device_key(device: torch.device) -> str:
        return device.type

    def _get_lookup_table(self):
        return inductor_config.lookup_table.table

    def lookup_template_configs(self, kernel_inputs, op_name, template_uids, template_hash_map=None):
        found = super().lookup_template_configs(kernel_inputs, op_name, template_uids, template_hash_map)
        self.hits += found
        return found


@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_inductor_finds_the_entry_in_a_compile(op):
    batch = (3,) if op == "bmm" else ()
    a, b = torch.randn(*batch, 5, 96), torch.randn(*batch, 64, 96).mT
    made = Problem.bmm(3, 5, 64, 96, dtype=torch.float32, layout="nt", **GPU) if batch else None
    problem = made or Problem.mm(5, 64, 96, dtype=torch.float32, layout="nt", **GPU)
    choices = Anywhere()
    choices.hits = []
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN"}
    torch._dynamo.reset()
    with (
        inductor_config.patch({"fx_graph_cache": False}),
        inductor_config.patch({"lookup_table.table": inductor_table(measured(problem))}),
        V.set_choices_handler(choices),
    ):
        found = torch.compile(lambda x, y: x @ y, options=options)(a, b)
    assert choices.hits == [f"aten::{op}"]
    assert torch.allclose(found, a @ b, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("single", [True, False], ids=["template", "measured"])
def test_inductor_compiles_an_entry_of_its_table(single):
    a, b = torch.randn(512, 384, device="cuda").bfloat16(), torch.randn(256, 384, device="cuda").bfloat16().mT
    problem = Problem.mm(512, 256, 384, layout="nt", **GPU)
    table = inductor_table(measured(problem, ("x", 5.0, tile(64, 32, 128)), ("y", 6.0, tile(32, 32, 128))))
    key, entries = key_of(problem), table[key_of(problem)]
    assert len(entries) == 3
    torch._dynamo.reset()
    changes = {"lookup_table.table": {key: entries[1:2] if single else entries}, "fx_graph_cache": False}
    with inductor_config.patch(changes), V.set_choices_handler(LookupTableChoices()):
        compiled = torch.compile(
            lambda x, y: x @ y, options={"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
        )
        found, [code] = run_and_get_code(compiled, a, b)
    if single:
        assert all(
            f"{name} : tl.constexpr = {value}" in code for name, value in (("BLOCK_M", 64), ("BLOCK_N", 32), ("BLOCK_K", 128))
        )
    else:
        assert "BLOCK_N : tl.constexpr = 32" in code or "extern_kernels.mm" in code
    assert ("triton_tem_fused_mm" in code) != ("extern_kernels.mm" in code)
    assert torch.allclose(found.float(), (a @ b).float(), rtol=0.02, atol=0.5)


def experts(op: str, tokens: int, **options: object) -> Problem:
    """Return a product of a layer of 8 experts with 128 columns in between, 64 columns outside and 2 experts for each token."""
    sizes = (2 * tokens, 128, 64) if op == "routed_grouped_mm" else (2 * tokens, 64, 128)
    words = {"gated": "silu"} if op == "routed_grouped_mm" else {}
    return Spec(op=op, groups=8, tokens=tokens, dtype="bfloat16", layout="nt", **words, **GPU, **options).problem(sizes, "")


def layer() -> list[Row]:
    def grouped(*sizes: int) -> dict:
        return tile(*sizes, template="grouped")

    def combined(*sizes: int) -> dict:
        return tile(*sizes, template="grouped_combined")

    up, down = "routed_grouped_mm", "combined_grouped_mm"
    return [
        *measured(
            experts(up, 16), ("a", 3.0, grouped(16, 32, 64)), ("b", 4.0, grouped(16, 64, 64)), ("c_swap", 1.0, grouped(16, 16, 64))
        ),
        *measured(experts(down, 16), ("d", 9.0, combined(16, 64, 64)), ("e", 2.0, combined(16, 128, 64))),
        *measured(experts(up, 64), ("f+routed", 1.0, grouped(64, 64, 64)), ("g", 5.0, grouped(32, 64, 64))),
    ]


def test_configs_of_experts_have_the_least_time_of_both_products():
    [(name, content)] = moe_configs(layer()).items()
    assert name == "E=8,N=128,device_name=NVIDIA_H200.json"
    assert [(tokens, config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"]) for tokens, config in content.items()] == [
        ("16", 16, 128),  # 4 + 2 µs; the gated tile has 64 gates too, and 3 + 9 µs of the other is more
        ("64", 32, 128),
    ]
    assert content["16"] == {
        "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 3
    }  # fmt: skip


def test_other_h200_are_named_as_vllm_names_them():
    machine = canonical({"device": "NVIDIA H200 NVL", "triton": "3.7.1"})
    rows = measured(experts("routed_grouped_mm", 1), ("a", 3.0, tile(16, 32, 64, template="grouped")), machine=machine)
    assert list(moe_configs(rows)) == ["E=8,N=128,device_name=NVIDIA_H200.json"]


def tiles_that_reads(function, folder):
    """Export the layer into a folder, and return the rows of a tile for each number of tokens that an engine's function reads."""
    open_store(settings.current()).put(layer())
    assert cli.run(["export", str(folder), "--format", "moe"]) == 0
    function.cache_clear()
    return {tokens: config["BLOCK_SIZE_M"] for tokens, config in function(8, 128, None).items()}


@needs("vllm")
def test_vllm_reads_the_configs(tmp_path, own_store, monkeypatch):
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    monkeypatch.setattr(module, "get_device_name_as_file_name", lambda: "NVIDIA_H200_NVL")
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path / "moe"))
    assert tiles_that_reads(module.get_moe_configs, tmp_path / "moe") == {16: 16, 64: 32}


@needs("sglang")
def test_sglang_reads_the_configs(tmp_path, own_store, monkeypatch):
    module = importlib.import_module("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config")
    monkeypatch.setattr(module, "get_device_name", lambda: "NVIDIA H200")
    usual = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    monkeypatch.setattr(module, "get_exec", lambda: usual)
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    folder = tmp_path / "configs" / f"triton_{module.triton.__version__.replace('.', '_')}"
    assert tiles_that_reads(module.get_moe_configs, folder) == {16: 16, 64: 32}


def test_signatures_of_tunableop_are_those_that_are_read():
    for op, layout, dtype in (("mm", "nt", "bfloat16"), ("mm", "tn", "float32"), ("bmm", "nn", "float16"), ("mm", "tt", "float64")):
        sizes = (3, 16, 64, 32) if op == "bmm" else (16, 64, 32)
        problem = Spec(op=op, layout=layout, dtype=dtype, **GPU).problem(sizes, "")
        [(entry, why)] = entries_of(f"{signature_of(problem)},Default,0.1")
        assert (why, entry["m"], entry["n"], entry["k"]) == ("", 16, 64, 32)
        assert (entry["op"], entry["layout"], entry["dtype"], entry.get("batch", 1)) == (op, layout, dtype, problem.batch)
    assert signature_of(Problem.mm(16, 64, 32, device_type="cpu")) == ""
    assert signature_of(Problem.addmm(16, 64, 32, **GPU)) == ""


def test_formats_are_exported_and_what_cannot_be_is_an_error(tmp_path, own_store, capsys, monkeypatch):
    open_store(settings.current()).put([*layer(), *measured(Problem.mm(16, 64, 32, layout="nt", **GPU))])
    table = tmp_path / "table.json"
    assert cli.run(["export", str(table), "--format", "inductor"]) == 0
    assert list(json.loads(table.read_text()).values()) == [[{"template_id": "aten::mm"}]]
    assert "1 product of" in capsys.readouterr().out
    assert cli.run(["export", str(table), "--format", "moe"]) == 1
    assert "export: cannot make the folder" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run(["export", str(tmp_path / "x.csv"), "--format", "tunableop"]) == 1
    assert "expected the one that will read the file: export it there" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.tunable, "get_validators", lambda: (("PT_VERSION", "2.13.0"),))
    assert cli.run(["export", str(tmp_path / "x.csv"), "--format", "tunableop"]) == 0
    assert (tmp_path / "x.csv").read_text().splitlines() == [
        "Validator,PT_VERSION,2.13.0",
        "GemmTunableOp_BFloat16_TN,tn_64_16_32_ld_32_32_64,Default,0.01",
    ]


@pytest.mark.parametrize(("file_format", "taken"), [("inductor", "one float dtype"), ("moe", "routed experts")])
def test_an_export_of_nothing_says_what_the_format_takes(file_format, taken, own_store, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a format is that of no file
    assert cli.run(["export", file_format, "--format", file_format]) == 0
    assert re.search(rf"^0 (products|layers) of .*\. This format takes measured .*{taken}", capsys.readouterr().out)
