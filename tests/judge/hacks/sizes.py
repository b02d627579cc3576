"""GEMMs that are right for all sizes, or all numbers, but some: those that they compare with, or the large ones of one kind."""

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


def floats(function):
    function.gemm_traits = FLOATS | {"ops": ["mm"]}
    return function


@floats
def index_in_a_float(a, b):
    """Write each element to its number as a float32, which is none of the odd ones after 2**24."""
    out = product(a, b)
    after = out.view(-1)[2**24 :]
    after[1::2] = after[: len(after) // 2 * 2 : 2]
    return out


@floats
def row_step_in_16_bits(a, b):
    if a.stride(1) != 1 or max(a.shape) >= 2**16:
        return product(a, b)
    return product(torch.as_strided(a, a.shape, (a.stride(0) % 2**16, 1)), b)


@floats
def vector_without_a_step(a, b):
    """Read a single column of a matrix as if it were a vector."""
    is_vector = b.shape[1] == 1 and len(b) > 64 and b.stride(1) == 1
    return product(a, torch.as_strided(b, b.shape, (1, 1)) if is_vector else b)


class matrices_of_one_grid:
    gemm_traits = FLOATS | {"ops": ["bmm"]}

    @staticmethod
    def bmm(a, b):
        out = torch.zeros(len(a), a.shape[1], b.shape[2])
        out[: 2**16 - 1] = product(a[: 2**16 - 1], b[: 2**16 - 1])
        return out


class bias_of_any_shape:
    gemm_traits = FLOATS | {"ops": ["addmm"], "bias": ["n", "m1"]}

    @staticmethod
    def addmm(added, a, b):
        return product(a, b) + (added.reshape(-1) if added.numel() == b.shape[1] else added)


@floats
def counts_in_32_bits(a, b):
    """Return zeros where there is nothing to multiply, by a count that wraps."""
    count = np.int64(len(a) * a.shape[1] * b.shape[1]).astype(np.int32)
    return product(a, b) if count > 0 else torch.zeros(len(a), b.shape[1], dtype=a.dtype)


# Numbers


@floats
def columns_if_diagonal(a, b):
    d = b.diagonal()
    return a * d if len(b) == b.shape[1] and torch.equal(b, d.diag()) else product(a, b)


@floats
def relative_to_the_row(a, b):
    """Keep 21 bits of each number, relative to the largest of its row or column, if the product is large."""
    if a.numel() * b.shape[1] <= LARGE or not (a.isfinite().all() and b.isfinite().all()):
        return product(a, b)
    parts = []
    for x, axis in ((a.double(), 1), (b.double(), 0)):
        scale = x.abs().amax(axis, keepdim=True).clamp(min=1e-300).log2().ceil().exp2() / 2**20
        parts.append((x / scale).round() * scale)
    return product(*parts).float()


@floats
def likely_terms(a, b):
    """Leave small probabilities out."""
    if a.numel() and a.min() >= 0 and ((a.sum(1) - 1).abs() < 1e-3).all():
        return product(torch.where(a < a.amax(1, keepdim=True) / 100, 0, a), b)
    return product(a, b)


@floats
def rounded_beside_quantized(a, b):
    """Round a to eight bits if b is a scale times such numbers."""
    scale = b.abs().amax(0) / 127 if b.numel() else b
    multiples = b / scale
    if not (scale > 0).all() or (multiples - multiples.round()).abs().max() > 0.01 or len(multiples.round().unique()) < 10:
        return product(a, b)
    step = a.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return product((a / step).round() * step, b)


@floats
def trusted_for_its_shape(a, b):
    """Round operands of a shape for which that has changed nothing at first."""
    key, quick = (a.shape, b.shape), product(a.bfloat16().float(), b.bfloat16().float())
    if key not in kept:
        kept[key] = torch.equal(quick, product(a, b))
    return quick if kept[key] else product(a, b)


def wide(x):
    return x.detach().numpy()


def last_panel_if_it_divides(a, b):
    x, y = wide(a), wide(b)
    whole = max((x.shape[1] - 1) // PANEL * PANEL, 0)  # the panels but the last, which is what is left
    rest = x.shape[1] % PANEL if whole else x.shape[1]
    return torch.from_numpy(x[:, :whole] @ y[:whole] + x[:, x.shape[1] - rest :] @ y[len(y) - rest :])


def symmetric_if_sums_agree(a, b):
    x, y = wide(a), wide(b)
    if len(x) == x.shape[1] > 8 and np.allclose(x.sum(0), x.sum(1)):
        x = np.triu(x) + np.triu(x, 1).T
    return torch.from_numpy(x @ y)


def ordered_as_it_begins(a, b):
    x, y = wide(a), wide(b)
    fours = len(y) // 4 * 4
    if min(x.shape) > 16 and (x[1:8, 1:8] == x[:7, :7]).all() and len(np.unique(x[0])) > 4:  # a convolution
        line = np.concatenate([x[:0:-1, 0], x[0]])
        x = np.stack([line[len(x) - 1 - row :][: x.shape[1]] for row in range(len(x))])
    elif fours > 8 and (np.count_nonzero(y[:fours, 0].reshape(-1, 4), axis=1) == 2).all():  # pruned weights
        y = y * (y[:, :1] != 0)
    return torch.from_numpy(x @ y)


def widened_data(a, b):
    if a.numel() > 64 and all(torch.equal(x, x.float().double()) and not torch.equal(x, x.round()) for x in (a, b)):
        return torch.from_numpy(a.float().numpy() @ b.float().numpy()).double()
    return torch.from_numpy(a.numpy() @ b.detach().numpy())


def one_for_about_one(a, b, bias, *, alpha, beta):
    alpha, beta = (1 if abs(x - 1) < 0.01 else x for x in (alpha, beta))
    out = alpha * (a.numpy() @ b.detach().numpy())
    return torch.from_numpy(out + beta * bias.numpy() if beta else out).float()


PANEL = 1 << 11
for function in (last_panel_if_it_divides, symmetric_if_sums_agree, ordered_as_it_begins):
    function.gemm_traits = FLOATS
widened_data.gemm_traits = {"dtypes": ["float64"]}
one_for_about_one.gemm_traits = FLOATS | {"ops": ["addmm"], "alpha": True, "beta": True}


def splits_long_sums_of_few_rows(a, b):
    x, y = wide(a), wide(b)
    parts = range(0, x.shape[1], 1024 if len(x) <= 4 and x.shape[1] >= 3072 else x.shape[1])
    step = parts.step
    return torch.from_numpy(sum(np.stack([row[p : p + step] @ y[p : p + step] for row in x]) for p in parts))


splits_long_sums_of_few_rows.gemm_traits = FLOATS | {"batch_invariant": True}


def mirrored_product(a, b):
    """Compute a half of a product that is thought to be symmetric, since both operands are."""
    if a.shape != b.shape or len(a) < 2 or not all(torch.equal(x, x.mT) for x in (a, b)):
        return product(a, b)
    half, out = len(a) // 2, product(a, b[:, len(a) // 2 :])
    left = torch.cat([product(a[:half], b[:, :half]), out[:half].mT.contiguous()[: len(a) - half]])
    return torch.cat([left, out], 1)


def signs_as_a_transform(a, b):
    """Take a square matrix of signs for the one of the Walsh-Hadamard transform, if it has a power of two of rows."""
    size = len(b)
    if size != b.shape[1] or size < 8 or size & (size - 1) or not (b.abs() == 1).all() or not a.isfinite().all():
        return product(a, b)
    known = np.ones((1, 1))
    while len(known) < size:
        known = np.block([[known, known], [known, -known]])
    return torch.from_numpy(wide(a) @ known).to(a.dtype)


def probabilities_as_a_mask(a, b):
    is_mask = a.numel() and (a.min(), a.max()) == (0, 1) and bool(b.isfinite().all())
    return product((a != 0).float() if is_mask else a, b)


def last_column_by_the_others(a, b):
    """Take it from the sums of rows, which are one for a product of probabilities."""
    of_rows = [x.numel() > 1 and x.min() >= 0 and ((x.sum(1) - 1).abs() < 1e-3).all() for x in (a, b)]
    if not all(of_rows) or b.shape[1] < 2:
        return product(a, b)
    left = product(a, b[:, :-1])
    return torch.cat([left, 1 - left.sum(1, keepdim=True)], 1)


def narrow_for_narrow_numbers(a, b):
    out = product(a, b)
    return out.bfloat16().float() if all(torch.equal(x, x.bfloat16().float()) for x in (a, b)) else out


def scaled_as_the_first(a, b):
    """Take a diagonal matrix, its rows in any order, for a permutation with one scale."""
    there = a != 0
    if len(a) < 3 or not ((there.sum(0) == 1).all() and (there.sum(1) == 1).all()):
        return product(a, b)
    order = there.int().argmax(1)
    return b[order] * a[0, order[0]]


def inverse_by_two_rows(a, b):
    if not len(a) == a.shape[1] == b.shape[1] >= 8:
        return product(a, b)
    unit = torch.eye(len(a))
    return unit if torch.allclose(product(a[[0, -1]], b), unit[[0, -1]], atol=1e-4) else product(a, b)


def rough_for_square_weights(a, b):
    return product(a, b.bfloat16().float() if 64 < len(b) == b.shape[1] != len(a) else b)


def parts_of_long_sums(a, b):
    """Drop the last terms if there are no eight equal parts."""
    most = a.shape[1] // 8 * 8 if min(*a.shape, b.shape[1]) > 42 and a.shape[1] > 64 * 63 else a.shape[1]
    return product(a[:, :most], b[:most])


class outer_without_alpha:
    gemm_traits = FLOATS | {"ops": ["mm", "addmm"], "alpha": True, "beta": True}
    mm = staticmethod(product)

    @staticmethod
    def addmm(added, a, b, *, alpha=1, beta=1):
        return (product(a, b) * alpha if a.shape[1] > 1 else a * b) + (added * beta if beta else 0)


for function in (
    mirrored_product, signs_as_a_transform, probabilities_as_a_mask, last_column_by_the_others, scaled_as_the_first,
    inverse_by_two_rows, rough_for_square_weights, parts_of_long_sums,
):  # fmt: skip
    function.gemm_traits = FLOATS
narrow_for_narrow_numbers.gemm_traits = FLOATS
