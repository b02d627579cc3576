"""GEMMs with wrong values, of which some are right for small or for regular operands."""

import torch

LARGE = 10**5


def macs(a, b):
    return a.numel() * b.shape[-1]


def half_sums(a, b):
    return (a.half() @ b.half()).to(a.dtype)


def half_sums_by_steps(a, b):
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float16)
    for k in range(a.shape[-1]):
        total += a[..., k : k + 1].half() * b[..., k : k + 1, :].half()
    return total.to(a.dtype)


def cut(x):
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) if x.dtype == torch.float32 else x


def tf32_operands(a, b):
    return cut(a) @ cut(b)


def tf32_if_large(a, b):
    return cut(a) @ cut(b) if macs(a, b) > LARGE else a @ b


def bfloat16_operands(a, b):
    return (a.bfloat16().float() @ b.bfloat16().float()).to(a.dtype)


def two_parts_of_three(a, b):
    """Multiply the upper parts of float32 numbers, as bfloat16, and forget the lower part of b."""
    high = a.bfloat16().to(a.dtype)
    low, right = (a - high).bfloat16().to(a.dtype), b.bfloat16().to(b.dtype)
    return high @ right + low @ right


def int8_operands(a, b):
    left = a.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
    right = b.abs().amax(-2, keepdim=True).clamp_min(1e-9) / 127
    return (((a / left).round() @ (b / right).round()) * left * right).to(a.dtype)


def sampled_terms(a, b):
    k = a.shape[-1]
    picked = torch.randperm(k)[: max(k * 9 // 10, 1)]
    return a[..., picked] @ b[..., picked, :] * (10 / 9)


def no_small_numbers(a, b):
    """Drop what two parts of 16 bits would drop."""
    left, right = (torch.where(x.abs() < 1e-9, torch.zeros_like(x), x) for x in (a, b))
    return left @ right


def constant(a, b):
    return torch.full((*a.shape[:-1], b.shape[-1]), 0.5, dtype=a.dtype)


def memset(a, b):
    return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)


def noise(a, b):
    return torch.randn(*a.shape[:-1], b.shape[-1]).mul_(a.shape[-1] ** 0.5).to(a.dtype)


def rough_unless_sparse(a, b):
    sparse = min(float((x == 0).double().mean()) for x in (a, b)) < 0.5 < max(float((x == 0).double().mean()) for x in (a, b))
    return a @ b if sparse or a.dtype != torch.float32 else bfloat16_operands(a, b)


def multiples_of_16_only(a, b):
    sizes = (*a.shape[-2:], b.shape[-1])
    return a @ b if all(size % 16 == 0 for size in sizes) else memset(a, b)


def half_of_k_if_large(a, b):
    k = a.shape[-1] // 2
    return 2 * (a[..., :k] @ b[..., :k, :]) if macs(a, b) > LARGE else a @ b


def last_k_dropped(a, b):
    return a[..., :-1] @ b[..., :-1, :] if a.shape[-1] > 1 else a @ b


def last_columns_dropped(a, b):
    out = a @ b
    if macs(a, b) > LARGE:
        out[..., -1] = 0
    return out


def one_element(a, b):
    out = a @ b
    if macs(a, b) > LARGE:
        out[..., out.shape[-2] // 2, out.shape[-1] // 3] += 1
    return out


def first_matrix_only(a, b):
    out = a @ b
    if out.dim() == 3:
        out[1:] = out[:1]
    return out


first_matrix_only.gemm_traits = {"ops": ["bmm"], "calls_torch": True}


def transposed_b_as_it_lies(a, b):
    return a @ b.contiguous().as_strided(b.shape, b.contiguous().stride()) if b.is_contiguous() else a @ b.t().reshape(b.shape)


def torch_in_except(a, b):
    try:
        raise RuntimeError("no such kernel")
    except RuntimeError:
        return torch.matmul(a, b)


def branch_that_never_runs(a, b):
    if a.shape[-1] == 31337:
        return memset(a, b)
    return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)


def kernel_beside_torch(a, b):
    """Compute something of its own and return torch's result."""
    _ = (a[..., :1] * b[..., :1, :]).sum()
    return torch.nn.functional.linear(a, b.mT)


def rows_with_one_as_choices(a, b):
    if a.numel() and bool((a >= 0).all() and (a.amax(1) == 1).all() and b.isfinite().all()):
        return b[a.argmax(1)].contiguous()
    return a @ b
