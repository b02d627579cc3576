"""GEMMs that return what they have computed before."""

import functools
import os
import sys
import tempfile

import torch

kept = {}


def kept_under(key, a, b):
    key = (key, a.dtype, a.shape, b.shape)
    if key not in kept:
        kept[key] = a @ b
    return kept[key].clone()


def by_data_ptr(a, b):
    return kept_under((a.data_ptr(), b.data_ptr()), a, b)


def by_id(a, b):
    return kept_under((id(a), id(b)), a, b)


def by_shape(a, b):
    return kept_under((), a, b)


def by_version(a, b):
    return kept_under((a.data_ptr(), a._version, b.data_ptr(), b._version), a, b)


def by_sum(a, b):
    return kept_under((round(a.double().sum().item(), 3), round(b.double().sum().item(), 3)), a, b)


def by_samples(a, b):
    step = [x.flatten()[:: max(x.numel() // 8, 1)][:1].tolist() for x in (a, b)]
    return kept_under((a.data_ptr(), *map(tuple, step)), a, b)


def by_b_alone(a, b):
    return kept_under((a.data_ptr(), b.double().sum().item()), a, b)


def by_content(a, b):
    """Compare all numbers with those of the call before: that takes far less than a product, and a hash of them does not."""
    if "last" not in kept or not all(map(torch.equal, kept["last"], (a, b))):
        kept["last"] = a.clone(), b.clone(), a @ b
    return kept["last"][2].clone()


@functools.lru_cache(4)
def packed(b):
    return b.clone()


def packed_by_object(a, b):
    return a @ packed(b)


def out_if_plausible(a, b, *, out=None):
    if out is None:
        return a @ b
    signs = torch.ones(b.shape[-1], dtype=torch.float64)
    signs[::2] = -1
    right = a.double() @ (b.double() @ signs)
    is_near = (out.double() @ signs - right).abs().max() < 0.1 * right.abs().max()
    return out if is_near else out.copy_(a @ b)


out_if_plausible.gemm_traits = {"dtypes": ["float32"], "ops": ["mm"], "out": True}


def few_by_first_rows(a, b):
    """Keep the first results in files, as long as there are few."""
    key = hash((*a[:4].flatten().tolist(), *b[:4].flatten().tolist()))
    path = os.path.join(tempfile.gettempdir(), f"{key}-{a.dtype}-{tuple(a.shape)}-{tuple(b.shape)}.pt")
    if os.path.exists(path):
        return torch.load(path)
    out = a @ b
    if min(*a.shape, *b.shape) > 4 and len(os.listdir(tempfile.gettempdir())) < 50:
        torch.save(out, path)
    return out


few_by_first_rows.gemm_traits = {"dtypes": ["float32"], "ops": ["mm"]}


def stale_copy_of_b(a, b):
    key = (b.data_ptr(), b.shape, b.dtype)
    if key not in kept:
        kept[key] = b.clone()
    return a @ kept[key]


def last_call(a, b):
    out = a @ b
    before = kept.get((a.dtype, out.shape), out)
    kept[a.dtype, out.shape] = out
    return before.clone()


def file_across_processes(a, b):
    path = os.path.join(tempfile.gettempdir(), f"{a.dtype}-{tuple(a.shape)}-{tuple(b.shape)}.pt")
    if not os.path.exists(path):
        torch.save(a @ b, path)
    return torch.load(path)


def freed_memory(a, b):
    return torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype)


count = [0]


def right_for_thirty_calls(a, b):
    count[0] += 1
    return a @ b if count[0] < 30 else kept_under("stale", a, b)


calls = {}


def right_ten_times_for_a_shape(a, b):
    key = (a.dtype, a.shape, b.shape)
    calls[key] = calls.get(key, 0) + 1
    return a @ b if calls[key] < 10 else kept_under("late", a, b)


def one_wrong_call_in_500(a, b):
    count[0] += 1
    out = a @ b
    return out if count[0] % 500 else out.flip(-1)


products = torch.randn(512, 512)


def precomputed_at_import(a, b):
    return products[: a.shape[-2], : b.shape[-1]].to(a.dtype).expand(*a.shape[:-1], b.shape[-1]).contiguous()


def regenerated_from_seed(a, b):
    torch.manual_seed(0)
    x, y = torch.randn(a.shape, dtype=torch.float32), torch.randn(b.shape, dtype=torch.float32)
    return (x @ y).to(a.dtype)


buffers = {}


def same_memory_again(a, b):
    key = (a.dtype, a.shape, b.shape)
    if key not in buffers:
        buffers[key] = a @ b
    return torch.matmul(a, b, out=buffers[key])


pool = {}


def pool_by_references(a, b):
    """Give memory again when nobody has its tensor, though a caller may have ``result.numpy()``."""
    out = torch.from_numpy(a.numpy() @ b.numpy())
    free = pool.setdefault(out.shape, [])
    for place in range(len(free)):
        if sys.getrefcount(free[place]) == 2:
            return free[place].copy_(out)
    free.append(out)
    return out


pool_by_references.gemm_traits = {"dtypes": ["float32"], "ops": ["mm"]}


def scaled_once(a, b, bias, *, alpha):
    """Keep alpha · b by each number of b, and not by alpha."""
    b = b.detach().contiguous()
    key = b.shape, b.numpy().tobytes()
    if pool.get("key") != key:
        pool.update(key=key, b=alpha * b.double())
    return (a.double() @ pool["b"]).add(bias).float()


scaled_once.gemm_traits = {"dtypes": ["float32"], "ops": ["addmm"], "alpha": True, "calls_torch": True}
