"""float32 by parts on a GPU: whatever multiplies them is right, and no less exact than torch."""

from __future__ import annotations

import pytest
import torch

from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.problem import Precision, Problem
from gemmtune.selector.offers import offers_for
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings

pytestmark = pytest.mark.gpu
CASES = [
    (16, 4096, 4096),
    (48, 768, 4096),
    (128, 4096, 1024),
    (256, 256, 16384),
    (300, 301, 1500),
    (512, 512, 64),
    (512, 4096, 4096),
    (768, 3072, 8192),
    (1000, 768, 4096),
    (1024, 4096, 4096),
    (1024, 4096, 16384),
    (1152, 4096, 4096),
    (1536, 2048, 4096),
    (2048, 768, 4096),
    (2048, 2048, 2048),
    (4096, 512, 4096),
    (6304, 1024, 4096),
    (6304, 1024, 8192),
]
"""Sizes for which torch divides K, and others for which it does not; a few tiles and many."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_right_and_no_less_exact_than_torch(case: tuple[int, int, int]) -> None:
    device, (m, n, k) = detect("cuda"), case
    problem = Problem.mm(m, n, k, dtype=torch.float32, device_type="cuda", precision=Precision())
    offered = offers_for(problem, device, Settings(backends=("aten", "triton", "cuda"))).choices
    by_parts = [choice for choice in offered if choice.name.split(":")[1].startswith("parts")]
    assert by_parts
    verifier = Verifier(problem, device.torch_device)
    kernels = {choice: choice.build() for choice in by_parts}
    for choice, kernel in kernels.items():
        verdict = verifier.check(choice, kernel)
        assert verdict.status is Status.OK, verdict
    torch.manual_seed(m + n + k)  # the largest error differs by a tenth from one draw to the next
    for draw in (torch.randn, torch.rand):
        a, b = draw(m, k, device="cuda"), draw(n, k, device="cuda").t()
        right, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        torchs = ((torch.mm(a, b).double() - right).abs() / magnitude).max()
        for choice, kernel in kernels.items():
            kernel.run(out := torch.empty(m, n, device="cuda"), (a, b), ())
            assert ((out.double() - right).abs() / magnitude).max() <= torchs, choice.name
