"""mm_plus_mm: the layouts of c and d count like those of a and b for legality, compilation and execution."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.backends.triton.backend import chosen_configs
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.legality import Predicate
from gemmtune.backends.triton.spec import specialise
from gemmtune.backends.triton.sums import predicate_for, products_of
from gemmtune.device import preset
from gemmtune.problem import Layout, Problem

SM90 = preset("sm90")
CONFIG = Config(block_m=64, block_n=64, block_k=64, stages=3, warps=4)
EVEN = Problem.mm_plus_mm(512, 512, 512, 256, dtype=torch.float16, device_type="cuda")


def changed(name: str, **fields: object) -> Problem:
    return dataclasses.replace(EVEN, **{name: dataclasses.replace(getattr(EVEN, name), **fields)})


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_an_odd_address_of_any_operand_narrows_its_accesses(name: str) -> None:
    problem = changed(name, offset=1)
    assert getattr(specialise(problem, CONFIG), name).pointer_divisor == 2
    assert getattr(specialise(EVEN, CONFIG), name).pointer_divisor == 16
    widths = [staged.width for staged in predicate_for(problem, SM90).staging(CONFIG)]
    assert min(widths) == 2
    assert [staged.width for staged in predicate_for(EVEN, SM90).staging(CONFIG)] == [16, 16]


def test_stages_need_asynchronous_copies_in_both_products() -> None:
    problem = dataclasses.replace(changed("c", offset=1), d=dataclasses.replace(EVEN.d, offset=1))
    reason = predicate_for(problem, SM90).check(CONFIG)
    assert reason is not None
    assert reason.startswith("stages 3: neither operand can be copied asynchronously")
    assert {config.stages for config in chosen_configs(problem, SM90, "default")} == {1}


def test_a_refusal_of_either_product_refuses_the_sum() -> None:
    short = Problem.mm_plus_mm(512, 512, 512, 24, dtype=torch.float16, device_type="cuda")
    assert predicate_for(short, SM90).check(CONFIG) == "block_k 64: half of it or more hangs over k = 24"
    assert max(config.block_k for config in chosen_configs(short, SM90, "default")) <= 32


def test_resources_are_the_larger_need_of_both_products() -> None:
    problem = changed("c", offset=1)
    needs = [Predicate(product, SM90).resources(CONFIG) for product in products_of(problem)]
    need = predicate_for(problem, SM90).resources(CONFIG)
    assert need.smem_bytes == max(x.smem_bytes for x in needs)
    assert need.registers > max(x.registers for x in needs)
    assert needs[0] != needs[1]


def test_splits_count_whole_blocks_of_each_product() -> None:
    problem = Problem.mm_plus_mm(64, 64, 65, 65, dtype=torch.float16, device_type="cuda")
    predicate = predicate_for(problem, SM90)
    split = dataclasses.replace(CONFIG, split_k=4)
    assert predicate.check_split(split) is None
    assert predicate.check_split(dataclasses.replace(split, split_k=5)) == "split_k 5: k = 65+65 has 4 blocks of 64"


def test_reads_tensors_at_odd_addresses_correctly(own_store) -> None:
    memory = [torch.randn(40, 50, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    a, b, c, d = memory[0][1:18, 3:23], memory[1][:20, 1:34], memory[2].t()[2:19, 5:36], memory[3][1:32, 7:40]
    problem = Problem(
        op="mm_plus_mm", a=Layout.of(a), b=Layout.of(b), c=Layout.of(c), d=Layout.of(d),
        out=Layout.contiguous((17, 33), torch.float32),
    )  # fmt: skip
    assert problem.layout_letters == "nn+tn"
    with settings.patch(search="quick"):
        assert torch.allclose(gemmtune.mm_plus_mm(a, b, c, d), a @ b + c @ d, atol=1e-4)
        assert gemmtune.explain("mm_plus_mm", a, b, c, d).problem == problem
