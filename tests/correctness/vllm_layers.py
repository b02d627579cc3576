"""Layers as vLLM hands them to its quantized kernels, and the weight that each stands for."""

from __future__ import annotations

import torch
from torch import nn
from vllm_models import in_words
from vllm_stand_in import MixedConfig, Packed

Tensor = torch.Tensor
BITS = {"uint4": 4, "uint4b8": 4, "uint8b128": 8}
NAMES = ("q", "s", "z")


def mixed_layer(config: MixedConfig, *, transposed: bool, seed: int = 0, device: str = "cpu") -> tuple[nn.Module, Tensor]:
    """Return a layer of 4 or 8 bits, and its weight [K, N]. With ``transposed`` it is laid out as compressed-tensors has it."""
    (k, n), bits = config.partition_weight_shape, BITS[config.weight_type]
    group = k if config.group_size == -1 else config.group_size
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**bits, (k, n), generator=draw)
    scales = ((torch.rand(k // group, n, generator=draw) + 0.5) / 2**bits).to(config.act_type)
    zeros = (
        torch.randint(1, 15, (k // group, n), generator=draw)
        if config.zero_points
        else torch.full((k // group, n), 2 ** (bits - 1))
    )
    weight = (numbers - zeros.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)
    words = in_words(numbers.t(), range(32 // bits), bits)  # [N, K/8]
    packed_zeros = in_words(zeros, range(8))  # [K/g, N/8]
    layer = nn.Module()
    if transposed:
        layer.q = Packed(words.to(device), input_dim=1, output_dim=0, packed_dim=1)
        layer.s = Packed(scales.t().contiguous().to(device), input_dim=1, output_dim=0)
        layer.z = Packed(packed_zeros.t().contiguous().to(device), input_dim=1, output_dim=0, packed_dim=0)
    else:
        layer.q = Packed(words.t().contiguous().to(device), input_dim=0, output_dim=1, packed_dim=0)
        layer.s = Packed(scales.to(device), input_dim=0, output_dim=1)
        layer.z = Packed(packed_zeros.to(device), input_dim=0, output_dim=1, packed_dim=1)
    return layer, weight.to(device)


def int8_layer(n: int, k: int, *, by_column: bool, static: bool, widths: list[int]) -> tuple[nn.Module, Tensor]:
    """Return a layer of int8, and its weight [N, K]. Without ``by_column`` there is a scale for each of its ``widths``."""
    draw = torch.Generator().manual_seed(3)
    numbers = torch.randint(-127, 128, (n, k), generator=draw, dtype=torch.int8)
    scale = torch.rand(n if by_column else len(widths), 1, generator=draw) / 100 + 0.001
    layer = nn.Module()
    layer.weight, layer.weight_scale = nn.Parameter(numbers, requires_grad=False), nn.Parameter(scale, requires_grad=False)
    layer.input_scale = nn.Parameter(torch.tensor([0.03, 0.04]), requires_grad=False) if static else None
    layer.input_zero_point = layer.azp_adj = None
    layer.logical_widths = widths
    each = scale if by_column else scale.repeat_interleave(torch.tensor(widths), 0)
    return layer, numbers.float() * each
