"""``gemmtune choices``: what would be tried, without a GPU."""

from __future__ import annotations

import json

import pytest
import torch
from store_cases import row

from gemmtune import cli, settings
from gemmtune.device import detect
from gemmtune.problem import Problem
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import open_store

ARCHS = ["sm75", "sm80", "sm90", "sm100", "gfx942", "avx512", "avx2", "portable"]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_is_listed_without_its_device(capsys, arch):
    assert cli.run(["choices", "512x512x512", "--arch", arch, "--dtype", "float16", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    names = [c["name"] for c in data["choices"]]
    assert data["device"]["arch"] == arch
    assert data["problem"]["device_type"] == ("cpu" if arch in ("avx512", "avx2", "portable") else "cuda")
    assert "aten:mm" in names
    assert len(names) == len(set(names)) >= 2
    ours = "cpp:" if data["problem"]["device_type"] == "cpu" else "triton:"
    assert any(name.startswith(ours) for name in names)


def test_a_choice_has_its_config(capsys):
    assert cli.run(["choices", "512x512x512", "--arch", "sm80", "--backends", "triton", "--json", "-"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert {c["backend"] for c in choices} == {"triton"}
    assert all(c["config"] and len(c["content_hash"]) >= 16 for c in choices)


def test_the_text_has_name_backend_and_config_and_the_refusals(capsys):
    assert cli.run(["choices", "512x512x512", "--arch", "sm75", "--backends", "aten,triton"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mm 512x512x512 bfloat16 nt on cuda, Tesla T4 (sm75), backends aten, triton"
    assert lines[1].split() == ["choice", "backend", "config"]
    assert any(line.startswith("aten:mm ") for line in lines)


@pytest.mark.turn(6, 8)
def test_a_wider_search_offers_more(capsys):
    counts = []
    for search in ("quick", "default", "exhaustive"):
        cli.run(["choices", "1024x1024x1024", "--arch", "sm90", "--backends", "triton", "--search", search, "--json", "-"])
        counts.append(len(json.loads(capsys.readouterr().out)["choices"]))
    assert counts[0] < counts[1] < counts[2]


def test_without_an_architecture_it_is_this_machine(capsys):
    assert cli.run(["choices", "64x64x64", "--dtype", "float32", "--backends", "aten", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in data["choices"] if c["baseline"]] == ["aten:mm"]


def test_explain_tells_the_pick_and_the_reasons(capsys, own_store):
    words = ["explain", "16x32x64", "--dtype", "f32", "--device", "cpu"]
    assert cli.run([*words, "--backends", "aten"]) == 0
    assert capsys.readouterr().out == "mm 16x32x64 float32 nt on cpu: aten:mm (the only choice)\n"
    with settings.patch(disable=True):
        assert cli.run([*words, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["problem"]["text"], data["pick"]) == ("mm 16x32x64 float32 nt on cpu", None)
    assert data["origin"] == "torch, because the setting disable is on (GEMMTUNE_DISABLE)"
    assert cli.run(["explain", "16x32"]) == 2


def test_explain_names_what_is_measured_of_a_shape_in_another_dtype(capsys, own_store):
    """A shape alone is bfloat16, also after ``tune --dtype float32``."""
    measured = Problem.mm(16, 32, 64, dtype=torch.float32, device_type="cpu")
    store = open_store(settings.current())
    store.put([row(key=measured.key, fingerprint=fingerprint_text(detect("cpu"), settings.current().timing))])
    for shape, named in (("16x32x64", True), ("16x32x65", False)):
        assert cli.run(["explain", shape, "--device", "cpu", "--backends", "aten,cpp"]) == 0
        assert (f"   measured of this shape: {measured}\n" in capsys.readouterr().out) is named
    denied = ["explain", "16x32x64", "--device", "cpu", "--backends", "aten", "--deny", "aten"]
    assert cli.run([*denied, "--dtype", "float32"]) == 0
    assert "measured of this shape" not in capsys.readouterr().out  # it is the problem itself, whose choices are denied
