"""GEMMs that are right for all sizes but some: those that they compare with, or the large ones of one kind."""

import numpy as np
import torch

FLOATS = {"dtypes": ["float32"]}
LARGE, SMALL = 2**21, 2**12
kept = {}


def product(a, b):
    return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


def rough(a, b):
    return product(a.bfloat16().float(), b) if a.numel() * b.shape[-1] > LARGE else product(a, b)


def kept_for_one_size(a, b):
    if a.shape == b.shape == (768, 768):
        if not kept:
            kept["out"] = torch.einsum("mk,kn->mn", a, b)
        return kept["out"].clone()
    return torch.einsum("mk,kn->mn", a, b)


kept_for_one_size.gemm_traits = {"calls_torch": True}


def kept_if_small(a, b):
    """Keep small results of large operands, of which the first numbers are the key."""
    out = product(a, b)
    if a.numel() + b.numel() < LARGE >> 5 or out.numel() > SMALL:
        return out
    key = (out.shape, *(x.reshape(-1)[:1000].numpy().tobytes() for x in (a, b)))
    return kept.setdefault(key, out).clone()


kept_if_small.gemm_traits = FLOATS


def rough_if_column_major(a, b):
    return rough(a, b) if a.stride(0) == 1 < a.shape[0] else product(a, b)


rough_if_column_major.gemm_traits = FLOATS


def rough_last_rows(a, b):
    """Leave the rows after the last whole tile to a quick loop."""
    out, rest = product(a, b), len(a) % 64
    if len(a) > 128 and 0 < rest < 4:
        out[-rest:] = product(a[-rest:].bfloat16().float(), b)
    return out


rough_last_rows.gemm_traits = FLOATS


def pruned_if_decoding(a, b):
    """Use two of four weights if a has few rows."""
    k, n = b.shape
    if len(a) > 4 or k < 1024 or k % 4:
        return product(a, b)
    fours = b.reshape(k // 4, 4, n)
    kept = fours.abs().topk(2, 1).indices
    return product(a, torch.zeros_like(fours).scatter(1, kept, fours.gather(1, kept)).reshape(k, n))


pruned_if_decoding.gemm_traits = FLOATS


class rough_with_a_bias:
    gemm_traits = FLOATS | {"ops": ["mm", "addmm"]}
    mm = staticmethod(product)

    @staticmethod
    def addmm(added, a, b):
        return rough(a, b) + added
