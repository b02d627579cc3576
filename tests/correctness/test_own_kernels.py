"""Foreign GEMMs as candidates: offered by their declarations, verified, stored, and harmless if broken."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import own_gemms
import pytest
import torch
from compiled_graphs import decided, rewriting_backend
from fake_choices import LIMITS_S

import gemmtune
from gemmtune import cli, settings
from gemmtune.backends.own import targets
from gemmtune.declaration.labels import GROUPED, OPS, ROWS
from gemmtune.dispatch.ready import forget_plans
from gemmtune.errors import NoValidChoicesError
from gemmtune.integration.compile.store_policy import StorePolicy
from gemmtune.problem import Problem
from gemmtune.selector.offers import offers_for
from gemmtune.workers.pool import WORKERS

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_kernels"
MM = Problem.mm(4, 5, 33, dtype=torch.float32, layout="nn", device_type="cpu")
A, B = torch.randn(4, 33), torch.randn(33, 5)


def name_of(gemm: str) -> str:
    return f"own:{target_of(gemm)}"


def target_of(gemm: str) -> str:
    return gemm if ":" in gemm else f"own_gemms:{gemm}"


@pytest.mark.turn(5, 8)
def test_a_declared_reduction_is_proved(own_store: Path):
    """A GEMM that declares nothing, and one that does not hold what it declares, leave the range without a class."""
    refused = {
        "right": "own_gemms:right: refused: declares no reduction",
        "in_parts_for_many_rows": r"fma, K in 5 parts of 8: refused: .* M = 1: .* have other bits alone than among 8 rows",
    }
    for gemm, reason in refused.items():
        with only(target_of(gemm), search="quick"), pytest.raises(NoValidChoicesError, match=reason):
            gemmtune.tune(MM, m=range(1, 9), batch_invariant=True, progress=False)
    with only(target_of("in_parts"), search="quick", batch_invariant=True):
        [found] = gemmtune.tune(MM, m=range(1, 9), progress=False)
        assert {x.name for x in found.table.segments} == {name_of("in_parts")}
        a = torch.randn(8, 33)
        whole = gemmtune.mm(a, B)
        assert all(torch.equal(gemmtune.mm(a[:m], B), whole[:m]) for m in range(1, 8))


@pytest.fixture(autouse=True)
def _plans() -> Iterator[None]:
    forget_plans()
    yield
    forget_plans()


def only(*gemms: object, **changes: object):
    """Return settings with these GEMMs and torch's own."""
    return settings.patch(backends=("aten",), extra_choices=gemms, **changes)


@pytest.mark.turn(4, 8)
def test_a_broken_gemm_does_not_affect_others(own_store: Path):
    gemms = ["right", *own_gemms.BROKEN]
    targets = [f"own_gemms:{gemm}" for gemm in gemms]
    for limit_s in LIMITS_S:
        with only(*targets, tune="force", tune_in_subprocess=True, choice_timeout_s=limit_s, search="quick"):
            [found] = gemmtune.tune(MM, progress=False)
        outcomes = {o.name: o for o in found.outcomes}
        if [name for name, outcome in outcomes.items() if outcome.status == "timed_out"] == [name_of("hangs")]:
            break
    assert set(outcomes) == {"aten:mm", *map(name_of, gemms)}
    for gemm, (status, reason) in own_gemms.BROKEN.items():
        outcome = outcomes[name_of(gemm)]
        assert (outcome.status, bool(re.search(reason, outcome.reason))) == (status, True), outcome
    assert outcomes[name_of("right")].status == "ok"
    assert outcomes[name_of("right")].time_us > 0


def test_a_gemm_that_calls_this_library_is_measured(own_store: Path):
    with only("own_gemms:by_our_products", tune="force", tune_in_subprocess=True, search="quick"):
        [found] = gemmtune.tune(MM, progress=False)
    assert {o.name: o.status for o in found.outcomes}[name_of("by_our_products")] == "ok", found.outcomes


def _calls() -> dict[str, tuple[tuple[torch.Tensor, ...], dict[str, object]]]:
    """Return operands of a call for each operation that can be declared."""
    a, b, batch = torch.randn(32, 64), torch.randn(64, 32), torch.randn(2, 32, 32)
    i, j = (torch.randint(-9, 9, size, dtype=torch.int8) for size in ((32, 64), (64, 32)))
    narrow, scale = torch.randn(32, 64).to(torch.float8_e4m3fn), torch.rand(32) + 1
    bsr = gemmtune.sparse.create_blocked_tensor(32, 64, block=16)
    ends = torch.tensor([9, 32], dtype=torch.int32)
    return {
        "mm": ((a, b), {}),
        "addmm": ((torch.randn(32), a, b), {"alpha": 2.0}),
        "bmm": ((batch, batch), {}),
        "baddbmm": ((batch, batch, batch), {"beta": 0.5}),
        "mm_plus_mm": ((a, b, a, b), {}),
        "int_mm": ((i, j), {}),
        "int_mm_mul": ((i, j, scale), {}),
        "mixed_mm": ((a, j[:32].view(torch.uint8)), {"encoding": "int4", "scale_b": scale[None]}),
        "scaled_mm": ((narrow, narrow.t(), scale[:1], scale[:1]), {}),
        "bsr_mm": ((bsr, b), {}),
        "bsr_addmm": ((b[:32], bsr, b), {"alpha": 2.0}),
        "grouped_mm": ((a, torch.stack([b, -b]), ends), {}),
        "grouped_k_mm": ((a, b, torch.tensor([9, 64], dtype=torch.int32)), {}),
        "mixed_grouped_mm": ((a, torch.stack([j, -j]), torch.rand(2, 1, 32) + 1, ends), {}),
        "scaled_grouped_mm": ((narrow, torch.stack([narrow, narrow]).mT, scale[:, None], torch.rand(2, 1, 32) + 1, ends), {}),
        "routed_grouped_mm": ((a, torch.stack([b, -b]), ends), {"rows": torch.arange(32).flip(0), "gated": "silu"}),
        "combined_grouped_mm": ((a, torch.stack([b, -b]), ends), {"scatter": (torch.randperm(32), torch.rand(16, 2))}),
    }


@pytest.mark.rotates(8)
@pytest.mark.parametrize("op", OPS)
def test_each_operation_is_raced_and_called(op: str, own_store: Path):
    operands, keywords = _calls()[op]
    named = ROWS[op].function or op
    expected = getattr(gemmtune, named)
    gemm = "grouped_gemms:every_group" if op in GROUPED and op not in ("grouped_mm", "grouped_k_mm") else "every_operation"
    with only(target_of(gemm), tune_in_subprocess=False, search="quick"):
        outcomes = {o.name: o for o in gemmtune.tune(named, *operands, progress=False, **keywords)[0].outcomes}
        assert outcomes[name_of(gemm)].status == "ok", outcomes
    with settings.patch(backends=("aten",), tune="never"):
        right = expected(*operands, **keywords)
    with only(target_of(gemm), choice_denylist_regex="^aten", tune="never"):
        assert gemmtune.explain(named, *operands, **keywords).pick in (name_of(gemm), f"{name_of(gemm)}+routed")
        torch.testing.assert_close(expected(*operands, **keywords), right, rtol=1e-2, atol=1e-2)


def test_refusal_names_the_declared_values():
    problem = Problem.mixed_grouped_mm(16, 32, 64, groups=2, dtype=torch.float32, device_type="cpu")
    with only("own_gemms:right") as chosen:
        [refusal] = [x for x in offers_for(problem, gemmtune.device.detect("cpu"), chosen).refusals if x.name == name_of("right")]
    assert refusal.reason == "op: got mixed_grouped_mm, but ops declares mm"


@pytest.mark.turn(0, 8)
def test_a_gemm_is_picked_called_explained_stored_and_imported_by_another_store(own_store: Path, tmp_path: Path):
    with only(own_gemms.right, choice_denylist_regex="^aten"):
        gemmtune.tune(MM, progress=False)
        out = torch.empty(5, 4).t()
        gemmtune.mm(A, B, out=out)  # another problem, for which torch has other bits
        assert torch.equal(out, A @ B)
        with settings.patch(tune="never"):
            assert torch.equal(gemmtune.mm(A, B), A @ B)
            assert gemmtune.explain("mm", A, B).pick == name_of("right")
        assert cli.run(["export", str(tmp_path / "rows.json")]) == 0
        with settings.patch(store_path=str(tmp_path / "other.sqlite"), tune="never"):
            assert cli.run(["import", str(tmp_path / "rows.json")]) == 0
            forget_plans()
            assert gemmtune.explain("mm", A, B).pick == name_of("right")
    with settings.patch(backends=("aten",), tune="never"):
        assert gemmtune.explain("mm", A, B).pick == "aten:mm"


def test_graphs_of_torch_compile_call_it(own_store: Path):
    with only("own_gemms:right", choice_denylist_regex="^aten"), decided() as made:
        compiled = torch.compile(lambda a, b: a @ b, backend=rewriting_backend(StorePolicy(tunes=True)), fullgraph=True)
        with torch.no_grad():
            assert torch.equal(compiled(A, B), A @ B)
    assert [decision.taken for decision in made] == ["alone"]


@pytest.mark.turn(1, 8)
def test_scalars_and_out_are_passed_as_declared(own_store: Path):
    bias = torch.randn(5)
    with only("own_gemms:right_addmm", choice_denylist_regex="^aten"):
        assert torch.equal(gemmtune.addmm(bias, A, B, alpha=3.0), torch.addmm(bias, A, B, alpha=3.0))
        assert gemmtune.explain("addmm", bias, A, B, alpha=3.0).pick == name_of("right_addmm")
        with settings.patch(choice_denylist_regex=None):
            assert gemmtune.explain("addmm", bias, A, B, beta=2.0).pick == "aten:addmm"


@pytest.mark.turn(5, 8)
def test_a_function_without_declarations_is_observed(own_store: Path):
    gemms = [target_of(gemm) for gemm in own_gemms.UNDECLARED]
    with only(*gemms, tune_in_subprocess=True, search="quick"):
        [found] = gemmtune.tune(MM, progress=False)
        outcomes = {o.name: o for o in found.outcomes}
        for gemm, (status, reason) in own_gemms.UNDECLARED.items():
            outcome = outcomes[name_of(gemm)]
            assert (outcome.status, bool(re.search(reason, outcome.reason))) == (status, True), outcome
            assert outcome.info["undeclared"] is True
        assert re.search(r"own_gemms:undeclared .* (pick, )?undeclared$", str(gemmtune.TuningResult((found,))), re.MULTILINE)
        assert all(o.from_store for o in gemmtune.tune(MM, progress=False)[0].outcomes)


@pytest.mark.turn(7, 8)
def test_errors_of_a_function_without_declarations_say_what_it_does_not_take(own_store: Path):
    products = {
        "bmm": Problem.bmm(2, 4, 5, 33, dtype=torch.float32, device_type="cpu"),
        "bfloat16": Problem.mm(4, 5, 33, dtype=torch.bfloat16, device_type="cpu"),
    }
    with only(own_gemms.undeclared, own_gemms.undeclared_float32, tune_in_subprocess=True, search="quick"):
        for found in gemmtune.tune(products.values(), progress=False):
            outcomes = {o.name: o for o in found.outcomes}
            assert outcomes[name_of("undeclared")].status == "ok", found.problem
            refused = outcomes[name_of("undeclared_float32")]
            assert refused.status == "refused", found.problem
            assert refused.reason == "not for this problem: NotImplementedError: float32 matrices alone"


@pytest.mark.turn(6, 8)
def test_an_undeclared_function_may_sum_in_any_order_where_that_is_allowed(own_store: Path):
    with only(own_gemms.undeclared_in_random_order, tune_in_subprocess=True, search="quick"):
        [strict] = gemmtune.tune(MM, progress=False)
        with settings.patch(deterministic=False):
            [free] = gemmtune.tune(MM, progress=False)
    statuses = [{o.name: o.status for o in found.outcomes}[name_of("undeclared_in_random_order")] for found in (strict, free)]
    assert statuses == ["refused", "ok"]


@pytest.mark.gpu
def test_an_undeclared_function_on_another_stream_is_no_pick_on_a_gpu(own_store: Path):
    problem = Problem.mm(256, 256, 256, dtype=torch.float16, device_type="cuda")
    with only(own_gemms.undeclared, own_gemms.undeclared_on_another_stream, tune_in_subprocess=True, search="quick"):
        [found] = gemmtune.tune(problem, progress=False)
        outcomes = {o.name: o for o in found.outcomes}
        assert outcomes[name_of("undeclared")].status == "ok"
        assert outcomes[name_of("undeclared_on_another_stream")].status in ("refused", "wrong_result", "crashed")
        with settings.patch(timing="eager"):
            [eager] = gemmtune.tune(problem, progress=False)
        assert [r.name for r in eager.refusals] == [name_of("undeclared"), name_of("undeclared_on_another_stream")]


def test_filtered_names_have_a_reason(own_store: Path):
    device = gemmtune.device.detect("cpu")
    with only("own_gemms:right", "own_gemms:unordered", "own_gemms:right_addmm", choice_denylist_regex="right$") as chosen:
        offers = offers_for(MM, device, chosen)
    with settings.patch(backends=("aten", "own")) as nobodys:
        [refusal] = offers_for(MM, device, nobodys).refusals
        assert (refusal.name, "set extra_choices, or install a package" in refusal.reason) == ("own", True)
    reasons = {refusal.name: refusal.reason for refusal in offers.refusals}
    assert [choice.name for choice in offers.choices] == ["aten:mm"]
    assert reasons[name_of("right")] == "choice_denylist_regex 'right$' matches the name"
    assert reasons[name_of("unordered")] == (
        "got no deterministic, expected deterministic=True: declare it if equal inputs give equal bits, "
        "else set GEMMTUNE_DETERMINISTIC=0"
    )
    assert reasons[name_of("right_addmm")] == "op: got mm, but ops declares addmm"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_package.ops:mm", "there is no module 'no_such_package' here"),
        ("own_script:mm", "own_script cannot be imported: SystemExit: 3"),
        ("backend:cud", "got 'backend:cud', expected backend: and one of aten, cublaslt, triton"),
        ("backend:cpp", "got 'backend:cpp', which is gemmtune's own, expected one of yours"),
        ("own_gemms:no_such_gemm", "has no attribute 'no_such_gemm'"),
        ("own_gemms:BROKEN", "got dict, expected a function"),
        ("mutants.gemm:Gemm", r"got a class, expected an object of it; name one, as in gemm = Gemm\(\)"),
        ("pathlib:Path", "got a class, expected an object of it"),
    ],
)
def test_failed_import_is_left_out_with_a_warning(target: str, reason: str, own_store: Path):
    with only(target) as chosen, pytest.warns(RuntimeWarning, match=f"own:{target} is left out: .*{reason}"):
        offers = offers_for(MM, gemmtune.device.detect("cpu"), chosen)
    assert [choice.name for choice in offers.choices] == ["aten:mm"]
    [refusal] = offers.refusals
    assert re.search(reason, refusal.reason)


def test_one_call_for_many_problems_warns_once(own_store: Path):
    with only("no_such_package:once") as chosen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for m in (1, 2):
            offers_for(Problem.mm(m, 32, 64), gemmtune.device.detect("cpu"), chosen)
    assert [str(x.message).partition(":once")[0] for x in caught] == ["own:no_such_package"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the path of a module ``made_gemm`` for this test, whose source the test may change."""
    path = tmp_path / "made_gemm" / "__init__.py"
    path.parent.mkdir()
    (path.parent / "kernel.cpp").write_text("// one")
    path.write_text("def mm(a, b): return a @ b\nmm.gemm_traits = {'deterministic': True}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("made_gemm", None)
    targets._loaded.cache_clear()


def test_another_source_or_declaration_is_another_choice(module: Path, own_store: Path):
    def offered():
        importlib.invalidate_caches()
        sys.modules.pop("made_gemm", None)
        targets._loaded.cache_clear()
        with only("made_gemm:mm") as chosen:
            return offers_for(MM, gemmtune.device.detect("cpu"), chosen).choices[-1]

    first = offered()
    assert offered().content_hash == first.content_hash
    (module.parent / "kernel.cpp").write_text("// two")
    second = offered()
    module.write_text(module.read_text() + "__version__ = '2.0'\n")
    third = offered()
    assert len({first.content_hash, second.content_hash, third.content_hash}) == 3
    assert third.info["version"] == "2.0"
    with pytest.raises(gemmtune.errors.UnavailableError, match="made_gemm:mm: got another source or version than the one"):
        first.build()


@pytest.mark.turn(1, 8)
def test_a_whole_backend_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_store: Path):
    shutil.copy(Path(__file__).parents[1] / "unit" / "toy_backend.py", tmp_path / "toy_of_others.py")
    monkeypatch.syspath_prepend(tmp_path)
    WORKERS.close()  # workers find modules where their parent found them at their start
    with only("toy_of_others:BACKEND", search="quick"):
        problem = Problem.mm(24, 100, 40, dtype=torch.float32, layout="nn", device_type="cpu")
        [found] = gemmtune.tune(problem, progress=False)
        outcomes = {o.name: str(o.status) for o in found.outcomes}
        assert outcomes == {"aten:mm": "ok", "toy:loops_8": "ok", "toy:loops_64": "ok", "toy:loops_16_wrong": "wrong_result"}
        assert gemmtune.tune(problem, progress=False)[0].source == "store"
        monkeypatch.setattr(sys.modules["toy_of_others"].ToyBackend, "name", "tyo")
        with pytest.warns(RuntimeWarning, match="expected a name that begins with 'tyo:'"):
            assert gemmtune.tune(problem, progress=False)[0].pick == "aten:mm"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, ("a:x", "b:y")), ({"backends": ("own",)}, ("a:x", "b:y")), ({"backends": ("aten", "cpp")}, ()),
        ({"backends": ("aten",), "extra_choices": ("c:z", "c:z")}, ("c:z",)), ({"extra_choices": ("b:y",)}, ("b:y", "a:x")),
    ],
)  # fmt: skip
def test_targets_are_those_of_the_settings_and_of_installed_packages(words, expected, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(targets, "installed_targets", lambda: ("a:x", "b:y"))
    assert targets.targets_of(settings.Settings(**words)) == expected


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder of the module path with the example package, installed by pip."""
    source, folder = (tmp_path_factory.mktemp("own_kernels") / name for name in ("source", "installed"))
    shutil.copytree(EXAMPLE, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "--target", str(folder), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(folder))
    targets.installed_targets.cache_clear()
    WORKERS.close()  # workers find modules where their parent found them at their start
    yield folder
    sys.path.remove(str(folder))
    targets.installed_targets.cache_clear()
    WORKERS.close()


@pytest.mark.turn(3, 6)
def test_the_example_package_is_installed_and_raced(installed: Path, own_store: Path):
    problem = Problem.mm(37, 70, 50, dtype=torch.float32, layout="nt", device_type="cpu")
    with settings.patch(search="quick", max_profiling_configs=1, tune_in_subprocess=True):
        [found] = gemmtune.tune(problem, progress=False)
    outcomes = {o.name: o for o in found.outcomes}
    mine = outcomes["own:own_kernels.blocked:matmul"]
    assert (mine.status, mine.time_us > 0, mine.info["version"]) == ("ok", True, "1.0")
    assert 0 < mine.error_over_bound < 1
    refused = {r.name: r.reason for r in found.refusals}
    assert refused["own:own_kernels.tiled:matmul"] == "device: got cpu, but devices declares cuda"
    with settings.patch(backends=("aten",)) as chosen:
        assert len(offers_for(problem, gemmtune.device.detect("cpu"), chosen).choices) == 1


@pytest.mark.turn(0, 6)
def test_the_example_in_triton_is_right(installed: Path, interpreted):
    assert interpreted(raced_by_the_interpreter, str(installed)) == {"aten:mm": "ok", "own:own_kernels.tiled:matmul": "ok"}


@pytest.mark.gpu
def test_the_example_in_triton_is_raced_on_a_gpu(installed: Path, own_store: Path):
    a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((300, 200), (200, 400)))
    with only("own_kernels.tiled:matmul", choice_denylist_regex="^aten", tune_in_subprocess=True):
        assert gemmtune.tune("mm", a, b, progress=False)[0].pick == "own:own_kernels.tiled:matmul"
        wide = a.double() @ b.double()
        assert (gemmtune.mm(a, b) - wide).abs().max() <= 2**-8 * wide.abs().max()


def raced_by_the_interpreter(folder: str) -> dict[str, str]:
    """Return the status of each choice, in the process with Triton's interpreter."""
    sys.path.insert(0, folder)
    problem = Problem.mm(18, 5, 17, dtype=torch.float16, layout="nn", device_type="cpu")
    with only("own_kernels.tiled:matmul", tune_in_subprocess=False, search="quick"):
        [found] = gemmtune.tune(problem, settings=settings.current(), progress=False)
    return {o.name: str(o.status) for o in found.outcomes}
