"""Default tables by prediction: the trees, the shipped files, what counts as measured, and the tables of GPUs that are not here."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import importlib
import itertools
import json
import logging
import math
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rotation import rotated

from gemmtune import Problem, settings
from gemmtune.device import preset
from gemmtune.errors import StoreError
from gemmtune.problem.rows import row_classes
from gemmtune.selector import defaults, predicted, predictor, shipped, trials
from gemmtune.selector.features import NAMES, SM_TFLOPS, Described, features, floor_us, kernel_of, kind_of, why_unknown
from gemmtune.selector.offers import named_choice, offers_for
from gemmtune.selector.predictor import Forest
from gemmtune.selector.progress import Progress
from gemmtune.selector.range_work import Work

H200 = dataclasses.replace(preset("sm90"), name="NVIDIA H200", l2_bytes=60 * 2**20)
H100 = dataclasses.replace(preset("sm90"), name="NVIDIA H100 80GB HBM3")
UNKNOWN = dataclasses.replace(preset("sm90"), name="NVIDIA H999")
GPU_BACKENDS = settings.Settings(backends=("aten", "triton", "cuda"), tune_in_subprocess=False)


def dense(m: int = 16, n: int = 4096, k: int = 4096, **more) -> Problem:
    return Problem.mm(m, n, k, device_type="cuda", **more)


def few_bits(m: int = 16, n: int = 4096, k: int = 4096, encoding: str = "int4") -> Problem:
    scales = "group_128" if encoding else "column"
    return Problem.mixed_mm(m, n, k, dtype=torch.bfloat16, encoding=encoding, scales=scales, device_type="cuda")


@pytest.fixture
def made_for(gpus_elsewhere):
    """Return the default tables for weights on a GPU, of which nothing is compiled or run."""
    return lambda problems, device: {
        x.work.rows_class.problem.op: (x, x.table())
        for x in defaults.defaults_for([row_classes(p)[0] for p in problems], device, GPU_BACKENDS, Progress())
    }


def test_trees_are_sums_of_the_leaves_that_comparisons_reach():
    generator = np.random.default_rng(0)
    shape = (2, 3, 7)
    forest = Forest(
        feature=generator.integers(0, 4, shape).astype(np.int8),
        threshold=generator.normal(size=shape).astype(np.float32),
        value=generator.normal(size=(2, 3, 8)).astype(np.float32),
        start=np.array([1.0, -1.0], np.float32),
    )
    rows = generator.normal(size=(5, 4)).astype(np.float32)
    expected = np.zeros((2, 5))
    for member, row in np.ndindex(2, 5):
        expected[member, row] = forest.start[member]
        for tree in range(3):
            place = 0
            while place < 7:
                right = rows[row, forest.feature[member, tree, place]] > forest.threshold[member, tree, place]
                place = 2 * place + 1 + int(right)
            expected[member, row] += forest.value[member, tree, place - 7]
    assert np.allclose(forest(rows), expected, atol=1e-5)
    assert forest.columns <= 4
    with pytest.raises(ValueError, match="expected complete trees"):
        dataclasses.replace(forest, feature=forest.feature[:, :, :6])
    with pytest.raises(ValueError, match=r"got leaves \(2, 3, 7\)"):
        dataclasses.replace(forest, value=forest.value[:, :, :7])


def test_the_shipped_files_are_small_complete_and_name_their_versions(monkeypatch):
    model = predictor.shipped_predictor()
    assert predictor.FILE.stat().st_size <= 2**20
    assert all(forest.columns <= len(NAMES) for forest in model.forests.values())
    assert set(model.portfolios) == {"dense", "int4", "int8"}
    assert set(model.forests) == {"dense", "widened"}
    assert model.portfolios["dense"].names
    for portfolio in model.portfolios.values():
        assert all(len(points) and (points >= 0).all() for points in portfolio.measured.values())
    files = sorted(shipped.FOLDER.glob("*.json.gz"))
    assert sum(path.stat().st_size for path in files) <= 4 * 2**20
    assert {shipped.file_of(machine["device"]) for machine in model.origin["machines"]} <= set(files)
    for path in files:
        found = shipped.unpacked(path.read_bytes())
        assert shipped.file_of(found.machine["device"]) == path
        assert {"torch", "triton", "cuda", "cublas", "driver", "device"} <= found.machine.keys()
        assert {"gemmtune", "measured"} <= found.versions.keys()
        for by_m in found.times.values():
            for times in by_m.values():
                assert sum(x.baseline for x in times) == 1
                assert [x.time_us for x in times] == sorted(x.time_us for x in times)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    data_files = importlib.import_module("data_files")
    again = predictor.unpacked(data_files.packed_predictor(model.forests, model.portfolios, model.origin))
    assert {kind: x.names for kind, x in again.portfolios.items()} == {kind: x.names for kind, x in model.portfolios.items()}


def test_damaged_files_are_named_and_nothing_else_changes(tmp_path, monkeypatch, caplog):
    whole, times = predictor.FILE.read_bytes(), shipped.file_of("NVIDIA H200").read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"PK" + whole[2:200], times):
        with pytest.raises(ValueError, match=r"damaged|expected"):
            predictor.unpacked(data)
    other = json.loads(gzip.decompress(times)) | {"version": 99}
    huge = gzip.compress(b" " * (shipped.MOST_BYTES + 10))
    for data in (b"", times[:100], whole, gzip.compress(b"[]"), gzip.compress(b'{"format": 1}'), huge):
        with pytest.raises(StoreError):
            shipped.unpacked(data)
    with pytest.raises(StoreError, match="of version 99, expected"):
        shipped.unpacked(gzip.compress(json.dumps(other).encode()))
    (tmp_path / "nvidia-h200.json.gz").write_bytes(times[:100])
    (tmp_path / "predictor.npz").write_bytes(whole[:100])
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(predictor, "FILE", tmp_path / "predictor.npz")
    predictor.shipped_predictor.cache_clear()
    shipped.shipped_for.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="gemmtune"):
            assert defaults.origin_for(row_classes(dense())[0], H200) == ""
            assert defaults.origin_for(row_classes(few_bits())[0], H200) == "rule"
        assert sum("install gemmtune again" in record.message for record in caplog.records) == 2
    finally:
        predictor.shipped_predictor.cache_clear()
        shipped.shipped_for.cache_clear()


def test_files_with_any_bytes_changed_are_whole_or_refused():
    whole, times = predictor.FILE.read_bytes(), shipped.file_of("NVIDIA H200").read_bytes()
    kinds = ((whole, predictor.unpacked, ValueError), (times, shipped.unpacked, StoreError))
    refused = dict.fromkeys((ValueError, StoreError), 0)
    for (data, unpacked, error), seed in itertools.product(kinds, [*range(60), 78, 221, 293, 298]):
        generator, changed = random.Random(seed), bytearray(data)
        if seed % 2:
            for _ in range(generator.choice((1, 30))):
                changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        else:
            begin, length = generator.randrange(len(data)), generator.randrange(2000)
            changed[begin : begin + length] = generator.randbytes(generator.randrange(2000))
        try:
            unpacked(bytes(changed))
        except error:
            refused[error] += 1
    assert min(refused.values()) > 50


def test_shipped_times_count_on_the_same_gpu_and_versions_only(monkeypatch, caplog):
    found = shipped.unpacked(shipped.file_of("NVIDIA H200").read_bytes())
    here = {**found.machine, "driver": "999.1", "timing": "spaced"}
    monkeypatch.setattr(shipped, "fingerprint", lambda *_: here)
    assert found.why_elsewhere(H200) == ""
    here["triton"] = "9.9"
    assert "triton: was" in found.why_elsewhere(H200)
    shipped.shipped_for.cache_clear()
    with caplog.at_level(logging.INFO, logger="gemmtune"):
        assert all(shipped.shipped_for(H200) is None for _ in range(2))
    shipped.shipped_for.cache_clear()
    assert sum("are not used here" in record.message for record in caplog.records) == 1
    assert shipped.shipped_for(UNKNOWN) is None


def test_choices_are_found_by_their_names():
    cases = [dense(m, n, k) for m in (1, 16, 512) for n, k in ((6144, 4096), (1152, 896))]
    cases += [few_bits(m, encoding=encoding) for m in (1, 16, 200) for encoding in ("int4", "")]
    cases.append(Problem.addmm(16, 6144, 4096, device_type="cuda"))
    for problem in rotated(cases, 3, "names of choices"):
        offered = offers_for(problem, H200, GPU_BACKENDS, on_this_machine=False).choices
        ours = [x for c in offered if c.backend != "aten" for x in (c, *c.launch_variants())]
        assert len(ours) > 20
        for choice in ours:
            made = named_choice(choice.name, choice.backend, problem, H200, GPU_BACKENDS)
            assert made is not None, (problem, choice.name)
            assert (made.name, made.content_hash) == (choice.name, choice.content_hash)
    wrong = ("triton:mm_16x64x256", "triton:mm_17x64x256_s4_w4", "triton:vec_1x8x256_s4_w2", "triton:nobody_16x64x64_s4_w4")
    wrong += ("cuda:cluster_1x2x3_s5_k2_g1", "cuda:nobody_1", "triton:mm_256x256x256_s6_w8", "aten:mm")
    for name in wrong:
        assert named_choice(name, name.split(":")[0], dense(64), H200, GPU_BACKENDS) is None, name
    with settings.patch(choice_denylist_regex="swap"):
        denying = dataclasses.replace(GPU_BACKENDS, choice_denylist_regex="swap")
        assert named_choice("triton:mm_64x16x128_s5_w4_pdl_swap", "triton", dense(), H200, denying) is None


def test_kernels_are_names_without_the_parameters_of_the_launch():
    names = {
        "cuda:skinny_i4_8x128x256_s4_w4x2_k2_interleaved_pdl4": "cuda:skinny_i4_8x128x256_s4_w4x2",
        "cuda:cluster_64x16x128_s5_k2_g3_swap_pdl": "cuda:cluster_64x16x128_s5_k2_swap",
        "triton:mm_64x16x128_s5_w4_k3_pdl_swap": "triton:mm_64x16x128_s5_w4_k_swap",
        "triton:mm_64x16x128_s5_w4_g16": "triton:mm_64x16x128_s5_w4",
    }
    assert {name: kernel_of(name) for name in names} == names


def test_nothing_is_predicted_that_was_never_measured():
    model = predictor.shipped_predictor()
    known = [dense(), few_bits(), few_bits(encoding=""), Problem.addmm(16, 4096, 4096, device_type="cuda"), dense(dtype="float16")]
    assert all(model.knows(p, H200) and model.knows(p, H100) for p in known)
    strange = [dense(dtype="float32"), dense(layout="nn"), Problem.bmm(4, 16, 64, 64, device_type="cuda")]
    assert not any(model.knows(p, H200) for p in strange)
    assert not any(model.knows(p, UNKNOWN) for p in known)
    assert why_unknown(dense(), UNKNOWN) == "NVIDIA H999 was never measured"
    portfolio = model.portfolios["dense"]
    few_rows = next(name for name in portfolio.names if name.startswith("triton:vec_1x"))
    assert portfolio.supports(few_rows, dense(1))
    assert not portfolio.supports(few_rows, dense(8))
    assert not portfolio.supports(few_rows, dense(1, 2**20, 2**16))
    assert not portfolio.supports("triton:mm_32x32x32_s1_w8", dense())
    choices = offers_for(dense(64), H200, GPU_BACKENDS, on_this_machine=False).choices
    baseline = next(c for c in choices if c.baseline)
    gains = model.gains(dense(64), H200, choices, baseline)
    supported = [portfolio.supports(c.name, dense(64)) for c in choices]
    assert [bool(np.isfinite(x)) for x in gains] == supported
    assert not np.isfinite(model.gains(dense(64), UNKNOWN, choices, baseline)).any()
    assert (model.gains(dense(64), H100, choices, baseline)[supported] < np.inf).all()


def test_a_preset_stands_for_the_measured_gpus_of_its_architecture():
    """Quick searches of these differ. Other searches, unknown architectures and real devices stand for themselves."""
    quick, measured = settings.Settings(search="quick"), predictor.shipped_predictor().devices
    assert {like.name for like in trials.devices_like(preset("sm90"), quick)} == set(measured) >= {H100.name, H200.name}
    for device, chosen in ((preset("sm90"), settings.Settings(search="default")), (preset("sm80"), quick), (H200, quick)):
        assert trials.devices_like(device, chosen) == (device,)


def test_features_of_kernels_with_one_stage_are_finite():
    problem = dense(64)
    described = [Described.of(f"triton:mm_32x32x32_s{stages}_w4", {}) for stages in (1, 2, 3)]
    found = features(problem, H200, [x for x in described if x is not None])
    assert len(found) == 3
    assert np.isfinite(found).all()


def test_features_are_those_that_the_shipped_models_learned():
    """2 x 32 tiles on 132 multiprocessors, with 7.4 TFLOP/s each and a memory of 4800 GB/s. Four blocks divide the K of a tile."""
    dense_us = {"memory_us": 2 * (4096 * 2048 + 96 * 2048 + 96 * 4096) / 4.8e6, "multiply_us": 2 * 96 * 4096 * 2048 / (7.4e6 * 132)}
    line, summed = 64 * 2 + 128 * 2, 2 * 16 * 32  # bytes along K, and the K of two rounds of blocks
    multiply_us, read_us = summed * 64 * 128 * 2 / 7.4e6, summed * line * 132 / 4.8e6
    floor = max(dense_us.values()) + 2
    logarithms = {
        "block_m": 64, "block_n": 128, "block_k": 32, "stages": 4, "warps": 8, "splits": 4, "cluster": 1, "parts": 4, "per_sm": 1,
        "m": 96, "n": 4096, "k": 2048, "scale_block": 2048, **{name: us + 2 for name, us in dense_us.items()},
        "cache": 4096 * 2048 * 2 / (60 * 2**20), "waves": 64 * 4 / 132, "steps": 16, "traffic": 64 * 2048 * line / 4.8e6 + 0.1,
        "partials": 64 * 4 * 64 * 128 * 8 / 4.8e6 + 0.1, "in_flight": line * 32 * 3, "multiply_path": multiply_us / floor + 0.01,
        "read_path": read_us / floor + 0.01, "path": read_us / floor + 0.01,
    }  # fmt: skip
    others = {"pdl": 0, "group_m": 8, "unrolled": 1, "swap": 0, "bits": 16, "zero": 0, "family": 1, "tail": 64 * 4 / 132 / 2}
    expected = {name: np.log2(x) for name, x in logarithms.items()} | others | {"filled_m": 96 / 128, "filled_n": 1}
    described = Described.of("triton:mm_64x128x32_s4_w8_k4", {"tile": (64, 128, 32), "stages": 4, "warps": 8, "splits": 4})
    found = dict(zip(NAMES, features(dense(96, 4096, 2048), H200, [described])[0], strict=True))
    assert found == pytest.approx(expected, rel=1e-5)
    expected = {"bits": 4, "scale_block": 7, "cache": expected["cache"] - 2, "in_flight": np.log2((64 * 2 + 128 / 2) * 32 * 3)}
    found = dict(zip(NAMES, features(few_bits(96, 4096, 2048), H200, [described])[0], strict=True))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_features_count_the_rounds_of_the_busiest_multiprocessor():
    problem, tile = few_bits(1024, 4096, 4096), (256, 128, 128)  # 4 x 32 tiles, 32 steps of K
    names = {
        "cuda:wgmma_i4_256x128x128_s3_w2t1b4_k2_pdl3": {"cluster": 2, "cluster_k": 2, "splits": 2},
        "cuda:skinny_i4_256x128x128_s3_w4x2_k2": {"cluster": 2, "cluster_k": 2, "splits": 4},  # warps divide K too
        "cuda:wgmma_i4_256x128x128_s3_w1t1b4_r2_k1_pdl3": {"splits": 1},
        "cuda:gemv_i4_256x128x128_s2_w8": {"splits": 16},
        "cuda:wgmma_stream_i4_256x128x128_s3_w2t1b4_b132_whole": {"whole": True, "splits": 1},
        "cuda:wgmma_stream_i4_256x128x128_s3_w2t1b4_b132": {"whole": False, "splits": 2, "cluster_k": 1},
    }
    described = [Described.of(name, {"tile": tile, **info}) for name, info in names.items()]
    assert [(x.parts, x.per_sm, x.balances) for x in described] == [
        (2, 1, False), (2, 1, False), (1, 2, False), (1, 1, False), (1, 1, False), (1, 1, True),
    ]  # fmt: skip
    rounds = [2 / 2, 2 / 2, 2, 1, 1, 128 / 132]  # of whole tiles, times the share of K that a block has
    found = features(problem, H100, described)[:, NAMES.index("multiply_path")]
    one_us = 4096 * 256 * 128 * 2e-6 / SM_TFLOPS
    assert np.allclose(found, [np.log2(x * one_us / floor_us(problem, H100) + 0.01) for x in rounds], atol=1e-3)


@pytest.mark.parametrize("encoding", ["int4", ""])
def test_the_rule_serves_up_to_four_rows_of_integers_and_tunings_favour_its_family(encoding, made_for):
    model, unshipped = predictor.shipped_predictor(), few_bits(n=5376, k=7168, encoding=encoding)
    [(default, table)] = made_for([unshipped], H200).values()
    assert table.origin.startswith(defaults.PREDICTED)
    by_rows = {m: table.segments[table.index(m)].name for m in (1, 2, 4, 8)}
    assert [name.startswith("cuda:gemv") for name in by_rows.values()] == [True] * 3 + [False]
    for m, name in by_rows.items():
        problem = default.work.rows_class.at(m)
        choices = offers_for(problem, H200, GPU_BACKENDS, on_this_machine=False).choices
        assert (model.times(problem, H200, choices) == {}) == (m <= 4)
        order = trials.trials_for(problem, H200, GPU_BACKENDS, choices)
        if m <= 4:
            first = next(c for c in choices if c.name.startswith("cuda:gemv"))
            assert name == predicted.launched_alone(first, GPU_BACKENDS).name
            assert first.name in order.favoured == {c.name for c in choices if c.name.startswith("cuda:gemv")}


@pytest.mark.parametrize("encoding", ["int4", ""])
def test_kernels_of_default_tables_wait_for_the_kernel_before_them(encoding, made_for):
    """Without it the estimates' first choices begin early, which costs time behind kernels that let nothing begin."""
    [(default, table)] = made_for([few_bits(encoding=encoding)], H200).values()
    kernels = [(x.name, default.work.choices[x.name]) for x in table.segments if x.backend == "cuda"]
    assert kernels
    assert not any("_pdl" in name or choice.config.pdl for name, choice in kernels)
    early = next(
        c
        for c in offers_for(default.work.rows_class.at(64), H200, GPU_BACKENDS, on_this_machine=False).choices
        if "_pdl" in c.name and c.backend == "cuda"
    )
    assert predicted.without_overlap(early, GPU_BACKENDS).source.digest == early.source.digest


def without_measurements(kernel):
    """Return the predictor without the measurements of a kernel of int4 weights."""
    model = predictor.shipped_predictor()
    known = model.portfolios["int4"]
    fewer = dataclasses.replace(known, measured={x: y for x, y in known.measured.items() if x != kernel})
    assert len(fewer.measured) == len(known.measured) - 1
    return dataclasses.replace(model, portfolios={**model.portfolios, "int4": fewer})


def test_a_kernel_that_was_not_measured_serves_where_its_estimate_is_clearly_the_least():
    model, problem = without_measurements("cuda:wgmma_i4_128x192x128_s4_w3t1b4"), few_bits(n=3072, k=3072)
    work = Work(row_classes(problem)[0], range(1, 8193), H200, GPU_BACKENDS, 0.0, Progress())
    gains, at = predicted.likely_gains(work, model, None), {m: work.rows_class.at(m) for m in predicted.ROWS}
    supports = model.portfolios[kind_of(problem)].supports
    new = {m: [name for name in found if name.startswith("cuda") and not supports(name, at[m])] for m, found in gains.items()}
    assert max(gains[512], key=gains[512].get) in new[512]
    assert not any(names for m, names in new.items() if m <= predicted.FEW_ROWS)
    for m, names in new.items():
        known = [x for x in gains[m] if x.startswith("cuda") and x not in names]
        likeliest = max(known, key=gains[m].get, default=None)
        for name in names:
            ours, its = (work.choices[x].at(at[m], H200).estimate_us for x in (likeliest, name))
            assert ours > predicted.CLEARLY * its
            assert gains[m][name] - gains[m][likeliest] == pytest.approx(math.log2(ours / its))


def test_other_launches_of_listed_kernels_are_known_and_filtered():
    model, found = predictor.shipped_predictor(), {}
    for now in (GPU_BACKENDS, dataclasses.replace(GPU_BACKENDS, choice_denylist_regex="_whole$")):
        work = Work(row_classes(few_bits())[0], range(1, 8193), H100, now, 0.0, Progress())
        found[now] = {name for m in predicted.ROWS for name in predicted.known_choices(work, work.rows_class.at(m), model)}
    every, fewer = found.values()
    named = {name for name in model.portfolios["int4"].names if name.startswith("cuda:")}
    assert len(named & every) > len(named) / 2
    assert {name for name in every if name.endswith("_whole")} == every - fewer != set()


@pytest.mark.parametrize(("time_us", "valid"), [(0, False), (-1.0, False), (1e-3, True), (1e9 - 1, True), (1e9, False)])
def test_shipped_times_are_within_their_limits(time_us, valid):
    with contextlib.nullcontext() if valid else pytest.raises(ValueError, match="got a time of"):
        assert shipped._time("aten:mm", "0", time_us, True).time_us == time_us


def test_digests_have_8_digits():
    times = shipped.unpacked(shipped.file_of("NVIDIA H200").read_bytes())
    assert [len(x.digest) for x in (times, predictor.shipped_predictor())] == [8, 8]


def test_a_prediction_takes_about_a_millisecond():
    model, problem = predictor.shipped_predictor(), dense(8)
    choices = offers_for(problem, H200, GPU_BACKENDS, on_this_machine=False).choices
    described = [x for c in choices if (x := Described.of(c.name, c.info)) is not None]
    taken = []
    for _ in range(20):
        begun = time.process_time()
        model.forests["dense"](features(problem, H200, described))
        taken.append(time.process_time() - begun)
    assert min(taken) <= 3e-3, f"{len(described)} choices: {min(taken):.4f} s"


@pytest.mark.turn(5, 8)
def test_default_tables_of_gpus(made_for):
    tables = made_for([dense(), few_bits(encoding="")], H100)
    table = tables["mm"][1]
    assert table.origin.startswith("predicted ")
    assert not table.segments[0].name.startswith("aten:")  # one row reads the weight at the memory's bandwidth
    assert table.segments[-1].name.startswith("aten:")
    assert (table.lo, table.hi) == (1, predicted.ROWS[-1])
    model = predictor.shipped_predictor()
    for x in table.segments:
        made = named_choice(x.name, x.backend, tables["mm"][0].work.rows_class.at(x.sampled_m), H100, GPU_BACKENDS)
        assert x.backend == "aten" or made.content_hash == x.content_hash
        assert x.backend == "aten" or model.portfolios["dense"].supports(x.name, dense(x.sampled_m))
    assert tables["mixed_mm"][0].origin.startswith("shipped ")
    assert made_for([few_bits(n=5248, k=5248)], H100)["mixed_mm"][0].origin.startswith("predicted ")
    assert made_for([dense()], UNKNOWN) == {}
    assert made_for([few_bits()], UNKNOWN)["mixed_mm"][0].origin == "rule"


def test_shipped_times_of_kernels_of_another_version_say_nothing():
    work, problem = Work(row_classes(few_bits())[0], range(1, 8193), H200, GPU_BACKENDS, 0.0, Progress()), few_bits(m=1)
    found = shipped.unpacked(shipped.file_of("NVIDIA H200").read_bytes())
    assert predicted.shipped_gains(work, problem, found)
    weight = shipped.weight_of(problem)
    others = [x if x.baseline else dataclasses.replace(x, content_hash="0" * 16) for x in found.times[weight][1]]
    assert predicted.shipped_gains(work, problem, dataclasses.replace(found, times={weight: {1: others}})) is None


def test_a_shipped_weight_gets_its_measured_choices(made_for):
    found = shipped.unpacked(shipped.file_of("NVIDIA H200").read_bytes())
    default, table = made_for([dense()], H200)["mm"]
    assert default.origin.startswith("shipped ")
    measured = {m: times[0] for m, times in found.times[shipped.weight_of(dense())].items()}
    for m, best in measured.items():
        served = table.segments[table.index(m)].name
        assert served == best.name or kernel_of(best.name) not in {kernel_of(x.name) for x in table.segments}, m
    elsewhere = made_for([dense()], H100)["mm"][0].origin
    assert elsewhere.startswith("predicted ")


def test_few_kernels_serve_a_model():
    gains = [{m: {f"triton:mm_{i}x16x16_s1_w1": 0.1 + i / 100 for i in range(40)} for m in (1, 2)} for _ in range(3)]
    assert len(predicted.kept_kernels(gains)) == 1  # the others add nothing
    apart = [{m: {f"triton:mm_{m}x16x16_s1_w1_k{i}": 0.5 for i in (2, 4)} for m in range(1, 60)}]
    kept = predicted.kept_kernels(apart)
    assert len(kept) == predicted.MOST_KERNELS
    assert all("_k_" in f"{kernel}_" for kernel in kept)
    assert predicted.kept_kernels([]) == frozenset()
    assert predicted.kept_kernels([{1: {"triton:mm_16x16x16_s1_w1": 0.001}}]) == frozenset()


@pytest.mark.turn(1, 8)
def test_a_model_of_shipped_weights_has_a_kernel_for_every_small_m(made_for, monkeypatch):
    monkeypatch.setattr(predicted, "MOST_KERNELS", 12)
    weights = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    classes = [row_classes(few_bits(n=n, k=k))[0] for n, k in weights]
    found = shipped.unpacked(shipped.file_of(H100.name).read_bytes())
    for default in defaults.defaults_for(classes, H100, GPU_BACKENDS, Progress()):
        assert default.origin.startswith("shipped ")
        slow = [x for x in default.segments() if x.name.startswith("aten:") and x.lo <= 512]
        assert slow == [], "torch dequantizes the whole weight at each call"
        gains = predicted.likely_gains(default.work, predictor.shipped_predictor(), found)
        problem = default.work.rows_class.at(16)
        measured = {c.name: gain for c, gain in predicted.shipped_gains(default.work, problem, found).items()}
        others = [gain for name, gain in gains[16].items() if name not in measured]
        assert others, "kernels that nobody measured at this M stand behind the measured ones"
        assert max(others) <= min(measured.values())
        assert measured.items() <= gains[16].items()


A100 = dataclasses.replace(preset("sm80"), name="NVIDIA A100-SXM4-80GB")


@pytest.mark.turn(0, 8)
@pytest.mark.parametrize("device", [UNKNOWN, H200], ids=lambda x: x.name)
def test_tunings_begin_with_what_a_measured_gpu_favours(device, monkeypatch, caplog):
    other = {**predictor.shipped_predictor().origin["machines"][0], "device": device.name, "triton": "9.9"}
    monkeypatch.setattr(shipped, "fingerprint", lambda *_: other)
    shipped.shipped_for.cache_clear()
    trials.measured_like.cache_clear()
    now = dataclasses.replace(GPU_BACKENDS, search="default")
    with caplog.at_level(logging.INFO, logger="gemmtune"):
        for problem in (dense(), few_bits(), dense(m=1)):
            choices = offers_for(problem, device, now, on_this_machine=False).choices
            order = trials.trials_for(problem, device, now, choices)
            assert next(c.name for c in choices if c.baseline) in order.first
            assert len(order.first) < 0.6 * len(choices)
            assert order.first[0] in order.favoured <= {c.name for c in choices}
            assert {c.name.partition("_")[0] for c in choices} == {name.partition("_")[0] for name in order.first}
    assert sum("tunings begin with the choices" in record.message for record in caplog.records) == 1
    for settled in (dataclasses.replace(now, search="exhaustive"), dataclasses.replace(now, batch_invariant=True)):
        assert trials.trials_for(problem, device, settled, choices) is None
    choices = offers_for(dense(), A100, now, on_this_machine=False).choices
    assert trials.trials_for(dense(), A100, now, choices) is None  # has other kernels
    unmeasured = Problem.mm(16, 64, 64, dtype=torch.float32, device_type="cuda")
    assert trials.trials_for(unmeasured, device, now, offers_for(unmeasured, device, now, on_this_machine=False).choices) is None
    shipped.shipped_for.cache_clear()
    trials.measured_like.cache_clear()
