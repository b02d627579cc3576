"""The aten backend: torch's own operations as choices.

====================  ==============================================================  ============================================
choice                call                                                            for
====================  ==============================================================  ============================================
aten:mm               torch.mm(a, b)                                                  mm
aten:addmm            torch.addmm(inp, a, b, beta=beta, alpha=alpha), inp as M×N      addmm
aten:bias_addmm       the same with inp as a vector of N, which cuBLASLt can add      addmm on a GPU
aten:bmm              torch.bmm(a, b)                                                 bmm
aten:baddbmm          torch.baddbmm(inp, a, b, beta=beta, alpha=alpha)                baddbmm
aten:mm_plus_mm       torch.mm(c, d).addmm_(a, b)                                     mm_plus_mm
aten:_int_mm          torch._int_mm(a, b)                                             int_mm
aten:_int_mm_pad      the same on operands padded with zeros                          int_mm on a GPU, where _int_mm refuses
aten:mixed_mm         torch.mm(a, (b.to(a.dtype) − zero_b) · scale_b)                 mixed_mm
aten:_scaled_mm       torch._scaled_mm(a, b, scale_a, scale_b, bias)                  scaled_mm where it is supported
aten:dequantized_mm   a product of wider floats                                       scaled_mm elsewhere, and on a CPU
aten:_grouped_mm      torch._grouped_mm(a, b, offs=offs)                              grouped products where torch has a kernel
aten:grouped_composed a product for each group                                        grouped products elsewhere, and on a CPU
====================  ==============================================================  ============================================

An epilogue makes each of them unfused: the operation, then the eagerly applied function (``aten:mm+eager``). Only
``_scaled_mm`` can include a bias.
"""

import torch

from ...choice import Availability, Offers
from ...device import DeviceInfo
from ...problem import Problem
from ...settings import Settings
from .offers import NAME, AtenChoice, offers

__all__ = ["BACKEND", "AtenChoice"]


class AtenBackend:
    """Backend of torch's operations, on every device."""

    name = NAME

    def available(self, device: DeviceInfo) -> Availability:
        if device.type != "cpu" and not torch.cuda.is_available():
            return Availability(ok=False, detail=f"torch {torch.__version__} sees no GPU here")
        return Availability(ok=True, detail=f"torch {torch.__version__}")

    def serves_by_default(self, device: DeviceInfo) -> bool:  # noqa: ARG002 - it serves every device
        return True

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:  # noqa: ARG002 - no setting applies
        return offers(problem, device)


BACKEND = AtenBackend()
