"""Adjacent weights have separate storages, so that saving, ties, sharding and training work as before ``optimize``."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Needed, accelerate, made, result, transformers
from processes import process
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.integration.adjacent import Rows, are_consecutive, is_sole, lay_out, same_inputs
from gemmtune.integration.quantize import flatten_state_dict, unflatten_state_dict
from gemmtune.quantized.parts import STATIC
from gemmtune.quantized.weight import QuantizedWeight

Tensor = torch.Tensor
safetensors = Needed("safetensors.torch")
KINDS = ("float64", "float32", "float16", "bfloat16", "int8", "int4", "float8")
FLOATS = KINDS[:4]
WIDTHS = {"q": 64, "k": 32, "v": 32}


class Heads(nn.Module):
    """Three layers that read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, n) for n in WIDTHS.values())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def inputs(kind: str, rows: int = 5) -> Tensor:
    dtype = getattr(torch, kind) if kind in FLOATS else torch.float32
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(2)).to(dtype)


def heads(kind: str, seed: int = 3) -> nn.Module:
    """Return a model whose weights are not adjacent."""
    torch.manual_seed(seed)
    model = Heads()
    return model.to(getattr(torch, kind)) if kind in FLOATS else gemmtune.quantize_(model, kind, group=32)


def moved_together(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Move the weights as ``optimize(tune=)`` does, without tuning, and return the model."""
    with torch.no_grad(), same_inputs(model) as groups:
        model(*args, **kwargs)
    lay_out(model, groups)
    return model


def optimized(kind: str) -> nn.Module:
    return moved_together(heads(kind), inputs(kind))


def parts(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that the Parameters consist of, by name."""
    found = {}
    for name, x in model.named_parameters():
        if isinstance(x, QuantizedWeight):
            found |= {f"{name}.{part}": piece for part in ("tensor", "scales") if (piece := getattr(x, part)) is not None}
        else:
            found[name] = x
    return found


def are_adjacent(model: nn.Module, kind: str = "float32") -> bool:
    """Return True if the weights and biases of q, k and v are adjacent in memory."""
    found = parts(model)
    names = ["bias", "weight"] if kind in FLOATS else ["bias", "weight.tensor", *(["weight.scales"] if kind != "int4" else [])]
    rows = [[found[f"{layer}.{name}"] for layer in WIDTHS] for name in names]
    return all(map(are_consecutive, rows))


@pytest.mark.parametrize("kind", KINDS)
def test_each_part_covers_a_separate_storage(kind):
    plain, model = heads(kind), heads(kind)
    versions = [x._version for x in parts(model).values()]
    moved_together(model, inputs(kind))
    assert are_adjacent(model, kind)
    assert not are_adjacent(plain, kind)
    found = parts(model)
    assert all(is_sole(x) and x.storage_offset() == 0 for x in found.values())
    assert len({x.untyped_storage().data_ptr() for x in found.values()}) == len(found)
    assert all(x.data_ptr() == x.untyped_storage().data_ptr() for x in found.values())
    before = parts(plain)
    assert [(x.dtype, x.shape, x.stride(), x.requires_grad, x.is_leaf) for x in found.values()] == [
        (x.dtype, x.shape, x.stride(), x.requires_grad, x.is_leaf) for x in before.values()
    ]
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(found.values(), before.values(), strict=True))
    if kind in FLOATS:
        assert [x._version for x in found.values()] == versions
    assert torch.equal(model(inputs(kind)), plain(inputs(kind)))


def test_a_second_move_changes_nothing():
    model = optimized("float32")
    places = {name: x.data_ptr() for name, x in parts(model).items()}
    moved_together(model, inputs("float32"))
    assert {name: x.data_ptr() for name, x in parts(model).items()} == places


def test_memory_lives_as_long_as_any_of_the_weights():
    model = optimized("float32")
    expected, k = model.k.weight.detach().clone(), model.k.weight
    del model
    gc.collect()
    held = [torch.randn(len(k), 64) for _ in range(100)]
    assert torch.equal(k, expected)
    del held


def test_one_group_at_a_time_exists_twice():
    layers, width = 6, 256
    group_bytes = 3 * width * width * 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model = nn.ModuleList([nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(3)]) for _ in range(layers)])
        lay_out(model, [list(group) for group in model])
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live_bytes = list(accumulate(changes))
    assert max(changes) == group_bytes
    assert live_bytes[-1] == layers * group_bytes
    assert max(live_bytes) == (layers + 1) * group_bytes


def safetensors_model(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    safetensors.save_model(model, folder / "model.safetensors")
    other = Heads().to(next(model.parameters()).dtype)
    missing, unexpected = safetensors.load_model(other, folder / "model.safetensors")
    assert not missing
    assert not unexpected
    return other.state_dict()


def safetensors_file(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    safetensors.save_file(flatten_state_dict(model.state_dict()), folder / "state.safetensors")
    return unflatten_state_dict(safetensors.load_file(folder / "state.safetensors"))


def accelerate_model(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    accelerate.Accelerator().save_model(model, folder)
    return safetensors.load_file(folder / "model.safetensors")


def torch_state(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    torch.save(model.state_dict(), folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


SAVED: tuple[tuple[Callable[[nn.Module, Path], dict[str, Tensor]], tuple[str, ...]], ...] = (
    (safetensors_model, FLOATS), (safetensors_file, KINDS), (accelerate_model, FLOATS), (torch_state, KINDS),
)  # fmt: skip


@pytest.mark.parametrize(
    ("save", "kind"), [pytest.param(save, kind, id=f"{save.__name__}-{kind}") for save, kinds in SAVED for kind in kinds]
)
def test_saved_files_have_every_weight(save, kind, tmp_path):
    model = optimized(kind)
    found = save(model, tmp_path)
    expected = heads(kind).state_dict()
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        weight = isinstance(x, QuantizedWeight)
        assert torch.equal(found[name].dequantize() if weight else found[name], x.dequantize() if weight else x), name


def test_a_model_of_transformers_is_saved_and_loaded_with_equal_logits(tmp_path):
    model, given = made("llama")
    with torch.no_grad():
        expected = result(model, given)
    moved_together(model, **given)
    attention = model.model.layers[0].self_attn
    assert are_consecutive([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    model.save_pretrained(tmp_path)
    assert safetensors.load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(result(again, given), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_sizes_are_those_of_the_tensors(kind):
    def saved_bytes(value: object) -> int:
        file = io.BytesIO()
        torch.save(value, file)
        return file.tell()

    model, plain = optimized(kind), heads(kind)
    assert saved_bytes(model.state_dict()) == saved_bytes(plain.state_dict())
    for x, y in zip(model.parameters(), plain.parameters(), strict=True):
        assert saved_bytes(x) == saved_bytes(y)
    narrow = [x for x in model.parameters() if isinstance(x, QuantizedWeight)]
    assert bool(narrow) == (kind not in FLOATS)
    assert all(STATIC in vars(part) for x in narrow for part in (x.tensor, x.scales)), "CUDA graphs would copy the parts"


def accelerates_ties(model: nn.Module) -> Any:
    return accelerate.utils.find_tied_parameters(model)


def safetensors_ties(model: nn.Module) -> Any:
    found = safetensors._find_shared_tensors(model.state_dict())
    return [names for names in found if len(names) > 1]


def transformers_ties(model: nn.Module) -> Any:
    id_of = Needed("transformers.pytorch_utils").id_tensor_storage
    places: dict[Any, list[str]] = {}
    for name, x in model.state_dict().items():
        places.setdefault(id_of(x), []).append(name)
    return [names for names in places.values() if len(names) > 1]


@pytest.mark.parametrize("ties", [accelerates_ties, safetensors_ties, transformers_ties])
@pytest.mark.parametrize("tied", [False, True])
def test_ties_are_found_as_before(ties, tied):
    model = heads("float32")
    if tied:
        model.other = nn.Linear(64, WIDTHS["v"])
        model.other.weight = model.v.weight
    before = ties(model)
    moved_together(model, inputs("float32"))
    assert bool(before) is tied
    assert ties(model) == before


def test_tied_weights_do_not_move():
    model = heads("float32")
    model.other = nn.Linear(64, WIDTHS["k"])
    model.other.weight = model.k.weight
    place = model.k.weight.data_ptr()
    moved_together(model, inputs("float32"))
    assert model.other.weight is model.k.weight
    assert model.k.weight.data_ptr() == place
    assert are_consecutive([model.q.weight, model.v.weight])


@pytest.mark.parametrize("hold", [
    lambda model: model.k.weight.data[:2],
    lambda model: model.k.weight.detach().numpy(),
    lambda model: model.state_dict(),
    lambda model: model.share_memory(),
    lambda model: setattr(model.k.weight, "data", torch.empty(2, *model.k.weight.shape)[0]),
    lambda model: model(inputs("float32").requires_grad_()),
], ids=["view", "numpy", "state_dict", "shared", "part", "graph"])  # fmt: skip
def test_shared_memory_does_not_move(hold, caplog):
    model = heads("float32")
    held, place = hold(model), model.k.weight.data_ptr()
    with caplog.at_level("INFO", logger="gemmtune"):
        moved_together(model, inputs("float32"))
    assert model.k.weight.data_ptr() == place
    assert not are_adjacent(model)
    assert "stay apart: several modules have them, or a view, a state_dict" in caplog.text
    del held


def stepped(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(inputs("float32")).square().sum().backward()
    optimizer.step()
    return model


def loaded(model: nn.Module, *, assign: bool = False) -> nn.Module:
    state = {name: x * 2 for name, x in heads("float32").state_dict().items()}
    model.load_state_dict(state, assign=assign)
    return model


def unpickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CHANGES: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "share_memory": (lambda model: model.share_memory(), False),
    "deepcopy": (copy.deepcopy, False),
    "unpickled": (unpickled, False),
    "to_dtype": (lambda model: model.to(torch.bfloat16), False),
    "half": (lambda model: model.half(), False),
    "load_state_dict": (loaded, True),
    "load_state_dict_assign": (lambda model: loaded(model, assign=True), False),
    "optimizer_step": (stepped, True),
    "restore": (gemmtune.restore, True),
    "requires_grad_": (lambda model: model.requires_grad_(False), True),
}
"""Changes of a model, and True if its weights are adjacent afterwards."""


@pytest.mark.parametrize("change", CHANGES)
def test_changes_act_as_on_separate_weights(change):
    apply, still = CHANGES[change]
    model, plain = apply(optimized("float32")), apply(heads("float32"))
    assert are_adjacent(model) is still
    for (name, x), (_, y) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(x, y), name
        assert (x.dtype, x.requires_grad, x.is_shared()) == (y.dtype, y.requires_grad, y.is_shared())
        assert is_sole(x) or x.is_shared()


@pytest.mark.parametrize("made_in_inference", [False, True])
def test_moves_in_inference_mode_keep_the_kind_of_parameters(made_in_inference):
    with torch.inference_mode(made_in_inference):
        model = heads("float32")
    with torch.inference_mode():
        moved_together(model, inputs("float32"))
    assert are_adjacent(model)
    assert all(x.is_inference() is made_in_inference for x in model.parameters())


def test_torch_refuses_to_resize_a_storage_on_a_cpu():
    weight = optimized("float32").k.weight
    with pytest.raises(RuntimeError, match="not resizable"):
        weight.untyped_storage().resize_(0)
    other = copy.deepcopy(weight)
    other.untyped_storage().resize_(0)
    assert other.untyped_storage().nbytes() == 0


def train(rank: int, folder: str, wrapper: str) -> list[Tensor]:
    """Run one of two processes: a step of an optimized model, whose weights differ before torch makes them equal."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{wrapper}", rank=rank, world_size=2)
    try:
        model = moved_together(heads("float32", seed=3 + (rank if wrapper == "ddp" else 0)), inputs("float32"))
        assert are_adjacent(model)
        if wrapper == "ddp":
            wrapped: Any = nn.parallel.DistributedDataParallel(model)
        else:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
            wrapped = torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(inputs("float32", 8).chunk(2)[rank]).square().sum().backward()
            optimizer.step()
        return [(x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone() for x in wrapped.parameters()]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.turn(1, 6)
@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.rotates(8)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_training_on_two_processes(wrapper, tmp_path):
    with process() as one, process() as two, ThreadPoolExecutor() as threads:
        first, second = threads.map(lambda job: job[0](train, job[1], str(tmp_path), wrapper), [(one, 0), (two, 1)])
    model = heads("float32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # the processes' gradients are averaged, not added
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs("float32", 8)).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, [x.detach() for x in model.parameters()])


def test_optimize_and_restore_keep_storages_apart(own_store, tmp_path):
    model, x = heads("float32"), inputs("float32")
    expected = model(x)
    with settings.patch(backends=("aten",), search="quick"):
        gemmtune.optimize(model, tune=x, progress=False)
    try:
        assert are_adjacent(model)
        torch.testing.assert_close(model(x), expected)
        assert safetensors_model(model, tmp_path).keys() == model.state_dict().keys()
    finally:
        gemmtune.restore(model)
    assert all(map(is_sole, model.parameters()))
    assert torch.equal(model(x), expected)


DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "bool", "complex64", "float8_e4m3fn", "float8_e5m2",
        "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    )
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_of_every_dtype(dtype):
    generator = torch.Generator().manual_seed(4)
    given = [torch.randint(0, 2, (n, 8 * dtype.itemsize), generator=generator, dtype=torch.uint8).view(dtype) for n in (6, 2, 4)]
    check_copies(given, Rows().copies(given))


def check_copies(given: list[Tensor], copies: list[Tensor] | None) -> None:
    assert copies is not None
    assert are_consecutive(copies)
    for x, y in zip(given, copies, strict=True):
        assert (x.dtype, x.shape, x.stride(), x.device) == (y.dtype, y.shape, y.stride(), y.device)
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        assert y.untyped_storage().nbytes() == y.nbytes
        assert y.data_ptr() == y.untyped_storage().data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1536, 512, 512), (2**25, 2**23, 2**23), (2**19, 2**19, 2**19)], ids=str)
def test_copies_on_a_gpu_are_blocks_of_torchs_allocator(sizes):
    given = [torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda") for size in sizes]
    rows = Rows()
    recorded, shared, freed = (rows.copies(given) for _ in range(3))
    for copies in (recorded, shared, freed):
        check_copies(given, copies)
    for x in recorded or ():
        x.record_stream(torch.cuda.Stream())
    for x in shared or ():  # not the recorded ones: torch aborts at exit where nobody takes a tensor that is both
        x.untyped_storage()._share_cuda_()
    for x, size in zip(freed or (), sizes, strict=True):
        before = torch.cuda.memory_allocated()
        x.untyped_storage().resize_(0)
        assert before - torch.cuda.memory_allocated() == size


@pytest.mark.gpu
def test_gpu_blocks_that_cannot_be_adjacent_give_none():
    assert Rows().copies([torch.zeros(100, dtype=torch.uint8, device="cuda") for _ in range(2)]) is None


@pytest.mark.gpu
def test_pinned_weights_do_not_move():
    model = heads("float32")
    for x in model.parameters():
        x.data = x.data.pin_memory()
    moved_together(model, inputs("float32"))
    assert not are_adjacent(model)
    assert all(x.is_pinned() for x in model.parameters())
