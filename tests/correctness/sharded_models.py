"""Checks of one rank of two, for ``test_sharding.py``: sharded, replicated and moved models, quantized and optimized."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_own_storage import are_adjacent, heads, moved_together
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.errors import InvalidProblemError

Tensor = torch.Tensor
KINDS = ("int8", "int4", "float8")


def drawn(*size: int, seed: int = 1) -> Tensor:
    """Return random numbers, equal in every process, on the default device."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), device="cpu").to(torch.get_default_device())


def batch() -> Tensor:
    """Return the input of the models."""
    return drawn(8, 64, seed=2)


def mlp(kind: str, seed: int = 0) -> nn.Sequential:
    """Return a model that is equal in every process."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    return model if kind == "float32" else gemmtune.quantize_(model, kind, group=32)


def layer(n: int, k: int, kind: str = "int8", scales: str = "column") -> nn.Linear:
    values = drawn(n, k)
    made = nn.Linear(k, n, bias=False)
    made.weight = nn.Parameter(QuantizedWeight.quantize(values.t(), kind, scales=scales).t(), requires_grad=False)
    return made


class Holder(nn.Module):
    """A module that reads its weight."""

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, _: Tensor) -> Tensor:
        return self.weight.dequantize()


class Rank:
    """One of two processes, with a check in each method. Both do each check, on the default device."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.device = torch.get_default_device()
        self.mesh = init_device_mesh(self.device.type, (2,))

    def fully_sharded(self, model: nn.Module, **options: Any) -> nn.Module:
        return fully_shard(model, mesh=self.mesh, **options)

    def parallel(self, model: nn.Module) -> nn.Module:
        return parallelize_module(model, self.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def shards_of(self, model: nn.Module) -> list[QuantizedWeight]:
        found = [getattr(x, "_local_tensor", x) for x in model.parameters()]
        return [x for x in found if isinstance(x, QuantizedWeight)]

    def refused(self, call: Callable[[], object], message: str) -> None:
        try:
            call()
        except InvalidProblemError as error:
            assert re.search(message, str(error)), f"{error} has no {message!r}"  # noqa: PT017
        else:
            raise AssertionError("nothing was raised")

    def fully_shard(self) -> None:
        for kind in KINDS:
            plain, model = mlp(kind), self.fully_sharded(mlp(kind))
            whole, shards = self.shards_of(plain), self.shards_of(model)
            assert [2 * x.nbytes for x in shards] == [x.nbytes for x in whole]
            for _ in range(2):
                x, y = batch().clone().requires_grad_(), batch().clone().requires_grad_()
                found, expected = model(x), plain(y)
                assert torch.equal(found, expected)
                found.square().sum().backward()
                expected.square().sum().backward()
                assert torch.equal(x.grad, y.grad)
            assert torch.allclose(model[0].bias.grad.full_tensor(), plain[0].bias.grad, rtol=1e-4)

    def fully_shard_of_other_kinds(self) -> None:
        policies = (
            {}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, {"reshard_after_forward": False},
            {"offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda")},
        )  # fmt: skip
        for kind, scales, k in (
            ("uint4", "group_64", 256),
            ("float8_e4m3fn", "tensor", 64),
            ("float8_e4m3fn", "block_128x128", 256),
        ):
            for options in policies:
                model = self.fully_sharded(nn.Sequential(layer(256, k, kind, scales)), **options)
                x = drawn(4, k)
                plain = layer(256, k, kind, scales)
                dtype = torch.bfloat16 if "mp_policy" in options else torch.float32
                assert torch.equal(model(x), plain.to(dtype)(x.to(dtype))), (kind, scales, options)
        packed = layer(64, 64, "int4", "group_32")
        packed.weight = nn.Parameter(gemmtune.prepack(packed.weight, op="mixed_mm"), requires_grad=False)
        assert torch.equal(self.fully_sharded(packed)(batch()), layer(64, 64, "int4", "group_32")(batch()))

    def fully_shard_refuses(self) -> None:
        for model, options in (
            (layer(65, 64), {}),
            (layer(1, 64), {}),
            (layer(64, 64), {"shard_placement_fn": lambda _: Shard(1)}),
        ):
            self.refused(lambda m=model, o=options: self.fully_sharded(m, **o), r"fully_shard makes equal shards .* ignored_params")
        model = nn.Sequential(nn.Linear(64, 64), layer(65, 64))
        assert self.fully_sharded(model, ignored_params={model[1].weight})(batch()).shape == (8, 65)
        flat = nn.Sequential(nn.Linear(64, 64), layer(65, 64))
        self.refused(
            lambda: FullyShardedDataParallel(flat, device_id=self.device, use_orig_params=True),
            "fully_shard, .*ignored_states",
        )
        flat = nn.Sequential(nn.Linear(64, 64), layer(65, 64))
        ignored = FullyShardedDataParallel(flat, device_id=self.device, ignored_states=[flat[1].weight])
        assert ignored(batch()).shape == (8, 65)

    def fully_shard_of_experts_and_columns(self) -> None:
        values = drawn(4, 64, 256)
        for kind in ("int8", "int4", "float8_e4m3fn"):
            scales = "group_32" if kind == "int4" else "column"
            for given in (values.mT, values, values[0]):  # experts like those of Mixtral and of GPT-OSS, and a weight of a Conv1D
                weight = QuantizedWeight.quantize(given, kind, scales=scales)
                weight = weight.mT if given is not values and given.dim() == 3 else weight
                model = self.fully_sharded(Holder(weight))
                for _ in range(2):
                    assert torch.equal(model(batch()), weight.dequantize()), (kind, given.shape)

    def tensor_parallel(self) -> None:
        for kind in KINDS:
            plain, model = mlp(kind), self.parallel(mlp(kind))
            rows, columns = self.shards_of(model)
            assert (rows.shape, columns.shape) == ((64, 64), (64, 64))
            x, y = batch().clone().requires_grad_(), batch().clone().requires_grad_()
            found, expected = model(x), plain(y)
            near = {"atol": 0.05 if kind == "float8" else 1e-5}  # a shard's rows are rounded by their own largest number
            assert torch.allclose(found, expected, **near)
            found.sum().backward()
            expected.sum().backward()
            assert torch.allclose(x.grad, y.grad, **near)
            for x, y in ((model[0], plain[0]), (model[2], plain[2])):
                whole = x.weight.full_tensor()
                assert isinstance(whole, QuantizedWeight)
                assert torch.equal(whole.dequantize(), y.weight.dequantize())

    def tensor_parallel_of_other_sizes(self) -> None:
        column, row = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
        for style, n, k, scales in ((column, 65, 64, "group_32"), (column, 1, 64, "column"), (row, 16, 192, "group_64")):
            plain, model = layer(n, k, "int4", scales), layer(n, k, "int4", scales)
            parallelize_module(model, self.mesh, style)
            x = drawn(4, k)
            assert torch.allclose(model(x), plain(x), atol=1e-4)
            assert torch.equal(model.weight.full_tensor().dequantize(), plain.weight.dequantize())
            assert isinstance(model.weight._local_tensor, QuantizedWeight)
        self.refused(lambda: parallelize_module(layer(16, 96, "int4", "group_32"), self.mesh, row), "quantize in groups of 32")

    def distributed_tensors(self) -> None:
        weight = layer(64, 128, "int4", "group_32").weight
        whole = distribute_module(mlp("int4", seed=self.rank), self.mesh)[0].weight
        assert torch.equal(whole._local_tensor.dequantize(), mlp("int4")[0].weight.dequantize()), "that of rank 0"
        by_rows = distribute_tensor(weight, self.mesh, [Shard(0)])
        by_columns = by_rows.redistribute(self.mesh, [Shard(1)])
        again = by_columns.redistribute(self.mesh, [Replicate()])
        own = distribute_tensor(weight, self.mesh, [Shard(0)], src_data_rank=None)
        for x, expected in ((by_columns, weight.dequantize().chunk(2, 1)[self.rank]), (again, weight.dequantize()),
                            (own, weight.dequantize().chunk(2)[self.rank])):  # fmt: skip
            assert isinstance(x._local_tensor, QuantizedWeight)
            assert torch.equal(x._local_tensor.dequantize(), expected)
        exchanged = torch.ops._dtensor.shard_dim_alltoall(by_rows._local_tensor, 0, 1, self.mesh.get_group().group_name)
        assert torch.equal(exchanged.dequantize(), weight.dequantize().chunk(2, 1)[self.rank]), "as NCCL reshards"
        assert torch.allclose(by_rows.sum().full_tensor(), weight.sum())
        assert own._local_tensor.tensor.untyped_storage().nbytes() == weight.tensor.nbytes // 2

    def data_parallel(self) -> None:
        for kind in KINDS:
            model, plain = mlp(kind, seed=self.rank), mlp(kind)
            wrapped = nn.parallel.DistributedDataParallel(model)
            assert torch.equal(wrapped(batch()), plain(batch())), "the weights of rank 0"
            wrapped(batch()[4 * self.rank :][:4]).sum().backward()
            plain(batch()).sum().backward()
            assert torch.allclose(model[0].bias.grad, plain[0].bias.grad / 2, rtol=1e-4)

    def collectives(self) -> None:
        mine = QuantizedWeight.quantize(torch.full((64, 64), 1.0 + self.rank).t(), "int4", scales="group_32").t()
        values, copies = (lambda weights: [x[0, 0].item() for x in weights]), [mine.clone(), mine.clone()]
        dist.all_gather(copies, mine)
        assert values(copies) == [1, 2]
        got = [mine.clone() for _ in range(3)]
        dist.broadcast(got[0], 1)
        dist.scatter(got[1], copies if self.rank == 0 else None, src=0)
        dist.broadcast(got[2], 0, async_op=True).wait()
        assert values(got) == [2, 1 + self.rank, 1]
        gathered = [mine.clone(), mine.clone()]
        dist.gather(mine, gathered if self.rank == 0 else None, dst=0)
        assert self.rank or values(gathered) == [1, 2]
        for call in (lambda: dist.all_reduce(mine), lambda: dist.send(mine, 1 - self.rank), lambda: dist.recv(mine, 0),
                     lambda: dist.all_gather_into_tensor(mine.clone(), mine)):  # fmt: skip
            self.refused(call, r"give its parts, or dequantize\(\) of it")
        self.refused(lambda: dist.broadcast(mine[3], 0), "got a view of a QuantizedWeight")

    def state_dicts(self) -> None:
        whole = StateDictOptions(full_state_dict=True)
        expected = mlp("int4")(batch())
        state = get_model_state_dict(self.fully_sharded(mlp("int4")), options=whole)
        for other, assign in ((mlp("int4", seed=3), False), (mlp("int4", seed=3), True)):
            other.load_state_dict(state, assign=assign)
            assert torch.allclose(other(batch()), expected, atol=1e-5), "aligned otherwise, torch may run another kernel"
        sharded = self.fully_sharded(mlp("int4", seed=3))
        set_model_state_dict(sharded, state, options=whole)
        assert torch.equal(sharded(batch()), expected)
        for assign in (False, True):
            other = self.fully_sharded(mlp("int4", seed=4))
            other.load_state_dict(self.fully_sharded(mlp("int4")).state_dict(), assign=assign)
            assert torch.equal(other(batch()), expected)

    def checkpoints(self) -> None:
        layouts: dict[str, Callable[[nn.Module], nn.Module]] = {
            "fully_shard": self.fully_sharded, "tensor_parallel": self.parallel, "whole": lambda model: model,
        }  # fmt: skip
        expected = mlp("int4")(batch())
        for name, before in layouts.items():
            dcp.save({"model": get_model_state_dict(before(mlp("int4")))}, checkpoint_id=self.folder / name)
            for after in layouts.values():
                model = after(mlp("int4", seed=5))
                state = {"model": get_model_state_dict(model)}
                dcp.load(state, checkpoint_id=self.folder / name)
                set_model_state_dict(model, state["model"])
                assert torch.allclose(model(batch()), expected, atol=1e-5), (name, after)
            nbytes = sum(file.stat().st_size for file in (self.folder / name).iterdir())
            assert nbytes < 2**15, "floats would be 64 KiB"

    def optimized(self) -> None:
        styles = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("q", "k", "v")}
        wrappers = (
            self.fully_sharded, nn.parallel.DistributedDataParallel, lambda model: parallelize_module(model, self.mesh, styles),
            lambda model: FullyShardedDataParallel(model, device_id=self.device),
        )  # fmt: skip
        with torch.no_grad(), settings.patch(backends=("aten",), search="quick", tune_in_subprocess=False):
            for kind in ("float32", "int4"):
                x = drawn(5, 64, seed=2)
                expected = heads(kind)(x)
                for wrap in wrappers[: None if kind == "float32" else 3]:
                    after = gemmtune.optimize(wrap(heads(kind)), tune=x, progress=False)
                    assert torch.allclose(after(x), expected, atol=1e-5), wrap
                    joined = moved_together(heads(kind), x)
                    # A GPU's allocator has no such places for tensors of this size.
                    assert are_adjacent(joined, kind) or self.device.type == "cuda"
                    before = wrap(gemmtune.optimize(joined))
                    assert torch.allclose(before(x), expected, atol=1e-5), wrap
                    for model in (before, after):
                        gemmtune.restore(model)

    def optimized_and_trained(self) -> None:
        x, plain = drawn(5, 64, seed=2), heads("float32")
        model = self.fully_sharded(heads("float32"))
        with settings.patch(backends=("aten",), search="quick", tune_in_subprocess=False):
            gemmtune.optimize(model, tune=x, progress=False)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "an optimizer would miss the shards"
        for each in (model, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.01)
            for _ in range(2):
                each(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(model(x), plain(x))
        gemmtune.restore(model)

    def compiled(self) -> None:
        for wrap in (self.fully_sharded, self.parallel, nn.parallel.DistributedDataParallel):
            torch._dynamo.reset()
            model = torch.compile(wrap(mlp("int4")), backend="aot_eager")
            with torch.no_grad(), settings.patch(tune="never"):
                for _ in range(2):
                    assert torch.allclose(model(batch()), mlp("int4")(batch()), atol=1e-5), wrap

    def quantized_too_late(self) -> None:
        for wrap in (self.fully_sharded, self.parallel):
            self.refused(
                lambda w=wrap: gemmtune.quantize_(w(mlp("float32")), "int8"), "DTensor .* quantize a model before it is sharded"
            )


def checks() -> list[str]:
    """Return the names of all checks."""
    return [name for name, check in vars(Rank).items() if name[0] != "_" and check.__code__.co_argcount == 1]


def run(rank: int, folder: str, name: str, device_type: str) -> str:
    """Do a check as one rank of two, and return its traceback if it fails."""
    backend = "gloo"
    torch.set_default_device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
        backend = "cpu:gloo,cuda:nccl"
    return _in_group(backend, folder, rank, 2, lambda: getattr(Rank(rank, Path(folder)), name)())


def run_alone(folder: str) -> str:
    """Shard models in a group of one process, and return the traceback if that fails."""
    return _in_group("gloo", folder, 0, 1, _alone)


def _in_group(backend: str, folder: str, rank: int, size: int, check: Callable[[], None]) -> str:
    where = f"file://{folder}/ranks"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        check()
    except Exception:  # noqa: BLE001 - the test shows it
        return traceback.format_exc()
    finally:
        dist.destroy_process_group()
    return ""


def _alone() -> None:
    mesh, bf16 = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for kind in KINDS:
        for options in ({}, {"mp_policy": bf16}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy(False)}):
            plain, model = mlp(kind), fully_shard(mlp(kind), mesh=mesh, **options)
            if "mp_policy" in options:
                plain = plain.to(torch.bfloat16)
            for seed in (0, 3):
                if seed:
                    other = mlp(kind, seed)
                    plain.load_state_dict(other.state_dict())
                    set_model_state_dict(model, other.state_dict(), options=StateDictOptions(full_state_dict=True))
                x, y = batch().requires_grad_(), batch().to(plain[0].bias.dtype).requires_grad_()
                found, expected = model(x), plain(y)
                assert torch.equal(found, expected), (kind, options, seed)
                found.sum().backward()
                expected.sum().backward()
                assert torch.equal(x.grad, y.grad.float()), (kind, options, seed)
