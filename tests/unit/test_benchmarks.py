"""The benchmark scripts: reading shapes, summing up, and one small run from end to end."""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from test_ranges import RowedBackend, backend

from gemmtune import settings
from gemmtune.cli.shapes import problem_of_entry
from gemmtune.cli.spec import Spec
from gemmtune.cli.words import OPS
from gemmtune.device import detect, preset
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.timing.rotation import cache_bytes

__all__ = ["backend"]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = [
    {"name": "one", "op": "mm", "m": 8, "n": 16, "k": 32, "dtype": "float32", "layout": "nt"},
    {"name": "two", "op": "addmm", "m": 4, "n": 8, "k": 16, "dtype": "bfloat16", "layout": "nn", "bias": "n"},
    {"name": "three", "op": "scatter_mm", "m": 4, "n": 8, "k": 16, "dtype": "float16", "layout": "nt"},
]


@pytest.fixture
def script(monkeypatch):
    """Imports a module of the folder, as its scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"shapes": SMALL}))
    return str(path)


@pytest.mark.parametrize(
    ("file", "device", "count"),
    [
        ("models", "cuda", 64),
        ("reference18", "cuda", 18),
        ("cpu", "cpu", 19),
        ("cpu_picks", "cpu", 5),
        ("quantized", "cuda", 42),
        ("long_sums", "cuda", 8),
        ("sums", "cuda", 6),
        ("few_rows", "cuda", 12),
        ("unaligned", "cuda", 11),
        ("grouped", "cuda", 38),
        ("bsr", "cuda", 61),
    ],
)
def test_shape_files_are_complete(script, file, device, count):
    entries, skipped = script("entries").read_entries(str(BENCHMARKS / "shapes" / f"{file}.json"), device, "")
    assert (len(entries), skipped) == (count, [])


def test_entries_are_filtered_and_skips_are_told(script, shapes):
    entries, skipped = script("entries").read_entries(shapes, "cpu", "")
    assert [str(e.problem) for e in entries] == [
        "mm 8x16x32 float32 nt on cpu",
        "addmm 4x8x16 bfloat16 nn inp[8] alpha=one beta=one on cpu",
    ]
    assert skipped == [f"skipped three: scatter_mm is not an operation of this version, which has {', '.join(OPS)}"]
    assert [e.name for e in script("entries").read_entries(shapes, "cpu", "^o")[0]] == ["one"]
    with pytest.raises(click.ClickException, match="leave no shape"):
        script("entries").read_entries(shapes, "cpu", "four")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"name": "two"}, "names must be unique, got two"), ({"kk": 3}, "one: kk: unknown field, expected name, op")],
)
def test_wrong_entry_is_named(script, tmp_path, change, message):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps([SMALL[0] | change, SMALL[1]]))
    with pytest.raises(click.ClickException, match=message):
        script("entries").read_entries(str(path), "cpu", "")


def test_summary_has_geomean_worst_and_totals(script):
    def row(name, ratio, seconds):
        references = {"torch": {"time_us": 1.0, "ratio": ratio, "ratio_margin": 0.0}}
        return {"name": name, "tuning_s": {"gemmtune": 1.0, "torch": seconds}, "regimes": {"graph": {"references": references}}}

    found = script("report").summary({"tuning_s": 7.0, "shapes": [row("x", 4.0, 2.0), row("y", 1.0, 3.0)]})
    assert found["graph"]["torch"] == {"geomean": pytest.approx(2.0), "worst": 1.0, "worst_shape": "y", "shapes": 2}
    assert found["tuning_s"] == {"gemmtune": 7.0, "torch": 5.0}


@pytest.mark.turn(4, 8)
def test_run_measures_and_writes_everything(script, shapes, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # the script sets it: the old value comes back afterwards
    out = tmp_path / "out.json"
    options = ["--shapes", shapes, "--device", "cpu", "--backends", "aten", "--seconds", "0.02", "--regime", "graph,eager"]
    limits = ["--bandwidth", "40", "--rate", "500"]
    done = CliRunner().invoke(script("run").main, [*options, *limits, "--host", "--second-run", "--json", str(out)])
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["environment"]["versions"]["torch"]
    assert [row["pick"] for row in report["shapes"]] == ["aten:mm", "aten:addmm"]
    for row in report["shapes"]:
        assert set(row["regimes"]) == {"graph", "eager"}
        assert row["regimes"]["graph"]["rounds"] >= 10
        assert row["limit_us"] > 0
    assert report["summary"]["graph"]["torch"]["shapes"] == 2
    assert report["host"]["ratio"] > 0
    assert report["second_run"]["seconds"] < 30
    assert "skipped three" in done.output
    assert "host cost of a warm call" in done.output


QUANTIZED = [
    {"op": "int_mm"},
    {"op": "int_mm_mul", "scales": "row", "out_dtype": "bfloat16"},
    {"op": "mixed_mm", "dtype": "float32", "dtype_b": "uint8"},
    {"op": "mixed_mm", "dtype": "float32", "encoding": "int4", "scales": "group_32", "zeros": True},
    {"op": "scaled_mm", "scales": "row", "bias": "n"},
    {"op": "scaled_mm", "out_dtype": "float32"},
]


@pytest.mark.parametrize("entry", QUANTIZED, ids=lambda e: "-".join(map(str, e.values())))
def test_a_call_of_gemmtune_and_one_of_torch_are_the_same(script, entry, own_store):
    problem = problem_of_entry({"m": 4, "n": 8, "k": 64} | entry, "here", Spec())
    operands = random_operands(problem, torch.device("cpu"), seed=1)
    calls = script("calls")
    with settings.patch(backends=("aten",), choice_denylist_regex="dequantized"):
        ours = calls.gemmtune_call(problem)(*calls.arguments(operands))
    refused = problem.op == "scaled_mm" and entry.get("scales") == "row" and torch.__version__ < "2.12"
    with pytest.raises(RuntimeError, match="per-tensor scaling for CPU") if refused else contextlib.nullcontext():
        theirs = calls.torch_call(problem)(*calls.arguments(operands))
    if refused:
        return
    assert ours.dtype == theirs.dtype == problem.out.dtype
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-3)


def test_the_dense_reference_is_for_quantized_products(script):
    device = detect("cpu")
    problem = Problem.int_mm(4, 8, 16, device_type="cpu")
    reference = script("references").dense(problem, device)
    assert reference.kernel.run_new((), ()).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="dense: expected one of int_mm, mixed_mm, scaled_mm, bsr_mm, bsr_addmm, got mm"):
        script("references").dense(Problem.mm(4, 8, 16, device_type="cpu"), device)


def test_run_refuses_unknown_words(script):
    done = CliRunner().invoke(script("run").main, ["--host", "--against", "torch,mkl"])
    assert done.exit_code == 2
    assert "got 'mkl', expected words out of torch, inductor" in done.output
    done = CliRunner().invoke(script("run").main, [])
    assert "got neither --shapes FILE nor --host" in done.output


def test_shapes_for_the_ranking_lie_around_the_size_of_the_cache(script):
    ranking = script("ranking")
    for device in (preset("sm90"), preset("avx512")):
        shares = [p.bytes / cache_bytes(device) for p in ranking.shapes(device, 30, seed=1)]
        assert 0.1 < min(shares) < 0.2
        assert 3 < max(shares) < 4.5


@pytest.mark.turn(7, 8)
def test_the_ranking_is_compared_with_long_runs(script, tmp_path):
    out = tmp_path / "ranking.json"
    arguments = ["--device", "cpu", "--shapes", "1", "--seconds", "0.05", "--backends", "aten", "--json", str(out)]
    with settings.patch(tune_in_subprocess=False, search="quick"):
        done = CliRunner().invoke(script("ranking").main, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    [row] = report["shapes"]
    assert row["pick"] == row["best"] == "aten:mm"
    assert row["used_us"]["aten:mm"] > 0
    assert report["summary"] == {"median": 0.0, "most": 0.0, "behind": []}


def test_repeated_picks_are_compared(script, monkeypatch):
    fresh = script("fresh")
    answers = iter(
        {"seconds": 1.0, "picks": {"one": pick, "two": "cpp:c"}, "speedups": {"one": 2.0, "two": None}, "disturbed": disturbed}
        for pick, disturbed in (("cpp:a", {}), ("cpp:b", {"one": "other processes used 80% of the cores"}), ("cpp:a", {}))
    )
    stores = []
    monkeypatch.setattr(fresh, "_answer", lambda *given: stores.append(given[3]["GEMMTUNE_STORE_PATH"]) or next(answers))
    told = fresh.repeated_picks("shapes.json", "cpu", "", {}, 3)
    assert len(set(stores)) == told["processes"] == 3
    assert told["same_pick"] == pytest.approx((2 / 3 + 1) / 2)
    assert told["shapes"]["one"] == {
        "share": 2 / 3, "picks": {"cpp:a": 2, "cpp:b": 1}, "speedups": [2.0, 2.0, 2.0], "disturbed": 1,
    }  # fmt: skip


@pytest.mark.turn(6, 8)
def test_tables_are_measured_from_end_to_end(script, backend: RowedBackend, tmp_path):
    """With times that are a function of M: no regret, and a trace that tunes and compiles nothing."""
    out = tmp_path / "rows.json"
    words = ["--device", "cpu", "--weights", "24x16,24x32", "--rows", "1..64", "--dtype", "float32", "--unseen", "2"]
    words += ["--calls", "60", "--python-calls", "60", "--json", str(out)]
    ran = CliRunner().invoke(script("rows").main, words, catch_exceptions=False)
    assert ran.exit_code == 0
    result = json.loads(out.read_text())
    assert [(row["segments"], row["compilations"]) for row in result["tuning"]] == [(2, 0), (2, 0)]
    summed = result["regret float32"]
    assert (summed["points"], summed["regret_geomean"], summed["regret_worst"]) == (4, 0.0, 0.0)
    assert 2 <= summed["of_torch_worst"] <= summed["of_torch_geomean"] <= 10
    python, _ = result["trace"]
    assert (python["tunings"], python["compilations"]) == (0, 0)
    assert set(python["origins"]) == {"range"}


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
def test_torchs_block_sparse_kernel_is_measured_with_its_best_parameters_that_are_right(script, monkeypatch):
    sparse, device = script("references_sparse"), detect("cpu")
    problem = Problem.bsr_mm(32, 64, 64, block=16, dtype=torch.float32, device_type="cpu", prepacked=True)
    seen = []

    def kernel(inp, weight, x, *, beta, out, meta=None):
        seen.append(meta)
        assert (inp is out, beta) == (True, 0)
        if meta and meta["num_stages"] == 4:
            raise RuntimeError("out of shared memory")
        wrong = meta and meta["num_stages"] == 3
        time.sleep(0.001 if not meta or meta["SPLIT_N"] == 1 else 0)
        return out.copy_(weight.to_dense() @ x * (2 if wrong else 1))

    monkeypatch.setattr(sparse, "torchs_kernel", lambda: kernel)
    best = sparse.sparse_best(problem, device)
    operands = random_operands(problem, torch.device("cpu"), seed=0)
    seen.clear()
    got = best.kernel.run_new(operands.tensors, ())
    assert torch.allclose(got, operands.a @ operands.weight.to_dense().t(), atol=1e-4)
    assert (seen[0]["num_stages"], seen[0]["SPLIT_N"]) == (1, 2)
    sparse.sparse_default(problem, device).kernel.run(operands.out, operands.tensors, ())
    assert seen[-1] is None
    plain = script("references").plain_torch(problem, device)
    assert torch.allclose(plain.kernel.run_new(operands.tensors, ()), got, atol=1e-4)
    with pytest.raises(RuntimeError, match="multiples of 16 tokens, got 17"):
        sparse.sparse_best(Problem.bsr_mm(17, 64, 64, block=16, device_type="cpu"), device)


BLOCKS = {"op": "bsr_mm", "n": 64, "k": 64, "dtype": "float32", "block": 16, "density": 0.5}


@pytest.mark.turn(2, 8)
@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
def test_a_run_in_parts_goes_on_where_it_ended(script, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    path, out = tmp_path / "blocks.json", tmp_path / "out.json"
    entries = [
        {"name": "one", "m": 4, "pattern": "banded"},
        {"name": "two", "m": 2, "imbalance": "skewed"},
        {"name": "three", "m": 1},
    ]
    path.write_text(json.dumps({"shapes": [BLOCKS | entry for entry in entries]}))
    words = [
        "--shapes",
        str(path),
        "--device",
        "cpu",
        "--backends",
        "aten",
        "--seconds",
        "0.02",
        "--bandwidth",
        "40",
        "--rate",
        "9",
    ]
    words += ["--against", "torch,torch-best", "--store", str(tmp_path / "kept"), "--json", str(out)]
    for more, count in (
        (["--limit", "1"], 1),
        (["--resume", "--only", "t", "--limit", "1"], 2),
        (["--resume", "--minutes", "9"], 3),
    ):
        ran = CliRunner().invoke(script("run").main, [*words, *more], catch_exceptions=False)
        assert ran.exit_code == 0, ran.output
        rows = json.loads(out.read_text())["shapes"]
        assert [row["name"] for row in rows] == ["one", "two", "three"][:count]
    assert all(row["regimes"]["graph"]["references"].keys() == {"torch"} and "torch-best" in row["errors"] for row in rows)
    refused = CliRunner().invoke(script("run").main, [*words, "--resume", "--seconds", "0.03"])
    assert "was measured with other values of seconds" in refused.output


def test_a_band_has_as_many_blocks_in_each_row(script):
    mask = script("patterns").band(4, 6, 0.3)
    assert mask.int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]
    problem = Problem.bsr_mm(2, 32, 48, block=8, density=0.3, dtype=torch.float32, device_type="cpu")
    weight = script("patterns").banded_operands(problem, detect("cpu")).weight
    assert torch.equal(weight.to_dense().reshape(4, 8, 6, 8).abs().sum(dim=(1, 3)) > 0, mask)
    with pytest.raises(RuntimeError, match="expected a block-sparse product, got mm"):
        script("patterns").banded_operands(Problem.mm(2, 4, 8, device_type="cpu"), detect("cpu"))


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
def test_a_vision_transformer_is_made_sparse_and_stepped(script):
    pytest.importorskip("transformers", reason="the models are those of transformers")
    steps, ways, cpu = script("model_steps"), script("model_ways"), torch.device("cpu")
    config = steps.MODELS["tiny-vit"]
    [scenario] = steps.scenarios(config, (2,), (512,), (64,))
    assert (scenario.name, scenario.tokens) == ("images-2", 34)
    model = steps.build_model(config, 1, cpu, torch.bfloat16)
    ways.Blocks.parse("16:0.25").sparsify_(model)
    sparse = [x for x in model.modules() if isinstance(x, torch.nn.Linear) and x.weight.layout is torch.sparse_bsr]
    assert len(sparse) == 6
    assert {len(x.weight.values()) for x in sparse} == {4, 12}
    for layer in sparse:
        layer.weight = torch.nn.Parameter(layer.weight.detach().to_dense())
    logits = scenario.step(model, cpu, torch.float32)
    assert logits.shape == (2, 1000)
    assert logits.isfinite().all()


def test_a_mixture_of_experts_is_stepped(script):
    pytest.importorskip("transformers", reason="the models are those of transformers")
    steps, cpu = script("model_steps"), torch.device("cpu")
    config = steps.MODELS["tiny-moe"]
    model = steps.build_model(config, 1, cpu, torch.bfloat16)
    assert model.dtype is torch.bfloat16
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 2 * 192, 64)
    for scenario in steps.scenarios(config, (3,), (17,), ()):
        wide, own = (scenario.step(model, cpu, dtype) for dtype in (torch.float32, torch.bfloat16))
        assert wide.shape[::2] == (3 if scenario.kind == "decode" else 1, 256)
        assert (own - wide).abs().max() <= 0.1 * wide.abs().max()


def test_public_models_are_those_of_transformers_and_stepped(script):
    pytest.importorskip("transformers", reason="the models are those of transformers")
    steps, ways, cpu = script("model_steps"), script("model_ways"), torch.device("cpu")
    classes = {"tiny": "Llama", "tiny-gemma": "Gemma2", "tiny-qwen": "Qwen2", "tiny-phi": "Phi3", "tiny-olmo": "Olmo2"}
    for name, family in classes.items():
        config = steps.MODELS[name]
        model = steps.build_model(config, 2, cpu, torch.bfloat16)
        assert type(model).__name__ == f"{family}ForCausalLM"
        [scenario] = steps.scenarios(config, (3,), (), ())
        wide, own = (scenario.step(model, cpu, dtype) for dtype in (torch.float32, torch.bfloat16))
        assert wide.shape == (3, 1, 256)
        assert (own - wide).abs().max() <= 0.1 * wide.abs().max()
        prepared = ways.prepare("eager", model, scenario, cpu, None, None)
        rows_of_embedding = 0 if config["tie_word_embeddings"] else 256 * 64 * 2
        assert prepared.weights_bytes - prepared.read_bytes == rows_of_embedding
        assert not prepared.copied
    published = {model["model_type"] for name, model in steps.MODELS.items() if not name.startswith("tiny")}
    assert published >= {"llama", "gemma2", "qwen2", "phi3", "olmo2"}


def test_an_interrupted_way_leaves_the_times_of_those_before(script, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="the models are those of transformers")
    model, look_up, out = script("model"), tmp_path / "native" / "look-up.so", tmp_path / "model.json"
    look_up.parent.mkdir()
    monkeypatch.setattr(model.build, "make", lambda: look_up)
    monkeypatch.setattr(model, "measure_limits", lambda *_: {"bandwidth_gbps": 10.0})
    prepared = model._runner

    def runner(way, *given):
        if way == "compile":
            raise KeyboardInterrupt
        return prepared(way, *given)

    monkeypatch.setattr(model, "_runner", runner)
    words = ["--model", "tiny-gemma", "--device", "cpu", "--layers", "1", "--batch", "2", "--prefill", "", "--rounds", "2"]
    done = CliRunner().invoke(model.main, [*words, "--ways", "eager,compile,optimize", "--json", str(out)])
    assert done.exit_code == 0, done.output
    [scenario] = json.loads(out.read_text())["scenarios"]
    assert scenario["ways"].keys() == {"eager", "compile"}
    eager = scenario["ways"]["eager"]
    assert eager["ms"] > 0
    assert eager["of_floor"] == pytest.approx(eager["weights_gb"] / 10.0 * 1e3 / eager["ms"])  # a tied embedding is the head
    assert scenario["ways"]["compile"] == {"error": "interrupted"}


def test_a_trace_counts_kernels_and_the_time_between_them(script):
    spans = (("nvjet_gemm", 0.0, 4.0), ("norm", 3.0, 5.0), ("nvjet_gemm", 7.0, 8.0))
    trace = script("model_trace").Trace(spans=spans)
    assert trace.busy_us == 6
    assert (trace.idle_us(), trace.idle_us(shorter=2.5), trace.idle_us(longer=2.0)) == (2, 0, 0)
    assert trace.kernels == [{"kernel": "nvjet_gemm", "count": 2, "us": 5.0}, {"kernel": "norm", "count": 1, "us": 2.0}]
    assert trace.gemm_share == 5 / 7
    assert script("model_trace").traced(lambda: None, torch.device("cpu")).gemm_share is None


def test_generation_is_compared(script, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="the extra 'models' installs it")
    monkeypatch.setattr(torch, "compile", lambda f: f)  # the ways that compile take half a minute
    look_up = tmp_path / "native" / "look-up.so"
    look_up.parent.mkdir()
    monkeypatch.setattr("gemmtune.native.build.make", lambda: look_up)  # so does its compiler
    out = tmp_path / "generate.json"
    options = [
        "--small",
        "--device",
        "cpu",
        "--ways",
        "transformers,optimize",
        "--prompts",
        "37,190",
        "--new",
        "3",
        "--json",
        str(out),
    ]
    done = CliRunner().invoke(script("generate").main, options)
    assert done.exit_code == 0, done.output
    ways = json.loads(out.read_text())["ways"]
    assert list(ways) == ["transformers", "optimize"]
    for row in ways.values():
        assert list(row["tokens_per_s"]) == list(row["first_call_s"]) == ["6", "11"]
        assert 0 < row["first_token_s"] < row["second_token_s"]
    assert ways["optimize"]["same_tokens"] == {"6": 3, "11": 3}
    assert "not begun" in str(CliRunner().invoke(script("generate").main, [*options[:3], "--seconds", "-1"]).output)


def test_a_trace_of_requests_is_served(script, tmp_path):
    pytest.importorskip("transformers", reason="the extra 'models' installs it")
    out = tmp_path / "serving.json"
    options = ["--small", "--device", "cpu", "--requests", "9", "--json", str(out), "--ways"]
    done = CliRunner().invoke(script("serving").main, [*options, "transformers,optimize"])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["ways"]
    assert list(rows) == ["transformers", "optimize"]
    for row in rows.values():
        assert row["tunings"] == []
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["largest_ms"]
        assert row["equal_answers"] == 1
    assert "not begun" in CliRunner().invoke(script("serving").main, [*options, "compile", "--seconds", "-1"]).output
    assert CliRunner().invoke(script("serving").main, [*options, "faster"]).exit_code == 2


def test_tables_of_a_model_are_timed_by_stage(script, backend: RowedBackend, tmp_path):
    out = tmp_path / "tables.json"
    options = ["--device", "cpu", "--kind", "float32", "--weights", "24x16,32x16", "--rows", "1..64", "--json", str(out)]
    done = CliRunner().invoke(script("model_tables").main, options)
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert {"24x16", "32x16"} < set(report["cold"]["stages_s"])
    assert set(report["again"]["stages_s"]) == {"before"}
    assert CliRunner().invoke(script("model_tables").main, [*options[:6], "--rows", "9..1"]).exit_code == 2


def test_the_entry_that_a_graph_took_is_read_from_its_code(script):
    integrations = script("integrations")
    problem = Problem.mm(16, 64, 96, layout="nt", device_type="cuda")
    aten, *templates = (
        {"template_id": "aten::mm"},
        *({"template_id": "triton::mm", "BLOCK_M": 16, "GROUP_M": 8, "num_warps": warps} for warps in (1, 2)),
    )
    table = {integrations.key_of(problem): [aten, *templates]}
    code = "num_warps=2,\ndef triton_tem_fused_mm(a):\n    BLOCK_M : tl.constexpr = 16\n    GROUP_M : tl.constexpr = 8\n"
    assert integrations.taken(table, problem, code) == templates[1]
    assert integrations.taken(table, problem, "extern_kernels.mm(a, b, out=buf0)  # num_warps=1,") == aten
    assert integrations.taken(None, problem, code) == aten


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cuda:wgmma_stream_i4_128x192x128_s4_w3t1b4_b132_pdl4", {"cuda", "cuda:wgmma_stream", "+pdl"}),
        ("cuda:grouped_k_128x128x64_s4_pdl", {"cuda", "cuda:grouped_k", "+pdl"}),
        ("triton:persistent_128x64x128_s4_w4_pdl_pad", {"triton", "triton:persistent", "+pdl", "+padded"}),
        ("triton:mm_64x16x128_s5_w4_k2_pdl_swap", {"triton", "triton:mm", "+split-K", "+pdl", "+swap"}),
        ("triton:mixed_words_16x64x128_s3_w2_group", {"triton", "triton:mixed_words", "+fragments"}),
        ("triton:decompose_45_bmm", {"triton", "triton:decompose"}),
        ("aten:mm+dense", {"aten", "aten:mm", "+dense"}),
        ("cublaslt:algo66_tile10_splitk1_reduction0", {"cublaslt"}),
    ],
)
def test_families_and_options_are_read_from_names(script, name: str, found: set[str]) -> None:
    assert script("family_worth").families(name) == found


@pytest.mark.turn(0, 8)
def test_a_family_is_worth_the_time_lost_without_it(script, monkeypatch) -> None:
    times = (("aten:mm", 10.0), ("triton:mm_16x16x16_s1_w1", 4.0), ("triton:vec_1x8x256_s4_w2", 5.0))
    families = script("family_worth")
    monkeypatch.setattr(families, "measured", lambda *_: iter([("file", "one", times)]))
    assert {name: found[0][0] for name, found in families.losses("").items()} == {
        "aten": 0.0, "aten:mm": 0.0, "triton": 1.5, "triton:mm": 0.25, "triton:vec": 0.0,
    }  # fmt: skip
    assert families.losses("^aten")["triton"] == [(float("inf"), "file", "one")]
    monkeypatch.undo()
    shown = CliRunner().invoke(families.main, ["--match", "^cuda:stream$", "--files", "dense-stream"])
    assert shown.exit_code == 0, shown.output
    assert "384 4096 14336" in shown.output
