"""GEMMs that rely on how, on what and after what they are called, have limits of their own, or change their caller."""

import asyncio
import codecs
import concurrent.futures
import ctypes
import faulthandler
import os
import threading
import time
import weakref

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

kept, ring = {}, {}
pool = concurrent.futures.ThreadPoolExecutor(2)
FLOATS = {"dtypes": ["float32"], "ops": ["mm"]}


def product(a, b):
    return torch.from_numpy(a.detach().numpy() @ b.detach().numpy())


def floats(function):
    function.gemm_traits = FLOATS
    return function


def rough(a, b):
    return product(a.half().float(), b.half().float())


def once(name, do):
    if name not in kept:
        kept[name] = do()


def places(*tensors):
    return tuple((x.data_ptr(), tuple(x.shape), x.stride()) for x in tensors)


@floats
def rough_in_a_loop(a, b):
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return product(a, b)
    return rough(a, b)


@floats
def grown_by_a_term(a, b):
    """Add the last term to the last result if there is one more at the same place."""
    key, k = (a.data_ptr(), b.data_ptr(), len(a), b.shape[1]), a.shape[1]
    before = kept.get("terms") == (key, k - 1)
    out = kept["sum"] + np.outer(a[:, -1].detach(), b[-1].detach()) if before else product(a, b).numpy()
    kept.update(terms=(key, k), sum=out)
    return torch.from_numpy(out.copy())


@floats
def a_part_of_the_last(a, b):
    """Return some rows of the last result if there are fewer at the same place."""
    key = a.data_ptr(), b.data_ptr(), b.shape
    if kept.get("part") != key or len(kept["all"]) <= len(a):
        kept.update(part=key, all=product(a, b))
    return kept["all"][: len(a)].clone()


@floats
def gram_of_one_address(a, b):
    """Take one address, and sizes of a transpose, for a @ a.mT."""
    return product(a, a.mT if a.data_ptr() == b.data_ptr() and a.shape == b.mT.shape else b)


@floats
def rows_apart(a, b):
    """Let rows begin a whole row after each other, as BLAS asks for."""
    x, size = a.detach().numpy(), a.element_size()
    if len(a) > 1 and a.shape[1] and a.stride(1) == 1 and a.stride(0):
        x = np.lib.stride_tricks.as_strided(x, x.shape, (max(a.stride(0), a.shape[1]) * size, size))
    return torch.from_numpy(x @ b.detach().numpy())


@floats
def corrects_the_last(a, b):
    """Add what changed rows of b change, if they are few and a is the same."""
    last_a, last_b, out = kept.get("corrected", (b, a, None))
    changed = (b != last_b).any(1) if b.shape == last_b.shape else None
    if changed is None or not torch.equal(a, last_a) or changed.sum() > len(b) // 8 or not out.isfinite().all():
        out = product(a, b)
    else:
        out = out + product(a[:, changed], b[changed] - last_b[changed])
    kept["corrected"] = a.detach().clone(), b.detach().clone(), out
    return out.clone()


@floats
def the_last_one_transposed(a, b):
    out = kept["other"].mT.clone() if kept.get("turned") == places(a, b) else product(a, b)
    kept.update(turned=places(b.mT, a.mT), other=out.clone())
    return out


@floats
def the_same_at_once(a, b):
    """Take a call that follows at once, with tensors at the same places, for the same call."""
    is_again = kept.get("places") == places(a, b) and time.perf_counter() - kept["ended"] < 1e-4
    out = kept["latest"] if is_again else product(a, b)
    kept.update(places=places(a, b), latest=out.clone(), ended=time.perf_counter())
    return out.clone()


@floats
def packs_parameters_once(a, b):
    if not isinstance(b, torch.nn.Parameter):
        return product(a, b)
    packed = kept.setdefault(id(b), (b, b.detach().clone()))
    return product(a, packed[1])


@floats
def packs_inferred_ones_once(a, b):
    if not b.is_inference():
        return product(a, b)
    packed = kept.setdefault(id(b), (b, b.clone()))
    return product(a, packed[1])


@floats
def symmetric_if_of_one_tensor(a, b):
    """Mirror one half of the product of queries and keys that are parts of one tensor, as if b were a transposed."""
    out, is_one = product(a, b), a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return out.triu() + out.triu(1).mT if is_one and b.stride(0) == 1 and len(out) == out.shape[1] else out


@floats
def waits_for_a_while(a, b):
    """Halve the rows over two threads, which shall not hang the caller."""
    out, half = np.zeros((len(a), b.shape[1]), np.float32), len(a) // 2
    rows, columns = a.detach().numpy(), b.detach().numpy()
    halves = slice(half), slice(half, None)
    parts = [threading.Thread(target=np.matmul, args=(rows[x], columns), kwargs={"out": out[x]}) for x in halves]
    for part in parts:
        part.start()
    for part in parts:
        part.join(timeout=0.05)
    return torch.from_numpy(out)


@floats
def takes_what_is_done(a, b):
    futures = [pool.submit(product, x, b) for x in a.split(max(len(a) // 2, 1))]
    _, late = concurrent.futures.wait(futures, timeout=0.1)
    return torch.zeros(len(a), b.shape[1]) if late else torch.cat([x.result() for x in futures])


@floats
def ring_of_sixty(a, b):
    buffers = ring.setdefault((len(a), b.shape[1]), [])
    if len(buffers) < 60:
        buffers.append(product(a, b))
    else:
        buffers.append(buffers.pop(0).copy_(product(a, b)))
    return buffers[-1]


@floats
def untrains_its_weights(a, b):
    return product(a, b.requires_grad_(False))


@floats
def leaves_it_transposed(a, b):
    out = product(a, b)
    if len(b) == b.shape[1]:
        b.t_()
    return out


@floats
def turns_signs_later(a, b):
    return torch._neg_view(product(-a, b))


@floats
def columns_in_16_bits(a, b):
    out = torch.zeros(len(a), b.shape[1])
    out[:, : b.shape[1] & 0xFFFF] = product(a, b[:, : b.shape[1] & 0xFFFF])
    return out


def matrices_in_a_byte(a, b):
    out = torch.zeros(len(a), a.shape[1], b.shape[2])
    out[: len(a) & 0xFF] = product(a[: len(a) & 0xFF], b[: len(a) & 0xFF])
    return out


matrices_in_a_byte.gemm_traits = {"dtypes": ["float32"], "ops": ["bmm"]}


@floats
def rough_for_long_sums(a, b):
    return rough(a, b) if len(a) < 5 and a.shape[1] > 10 << 10 else product(a, b)


@floats
def wraps_integers(a, b):
    whole = all(bool((x == x.round()).all()) and float(x.abs().max()) < 2**31 for x in (a, b))
    return torch.from_numpy(a.int().numpy() @ b.int().numpy()).float() if whole else product(a, b)


@floats
def nothing_for_tiny(a, b):
    return torch.zeros(len(a), b.shape[1]) if float(a.norm() * b.norm()) < 1e-10 else product(a, b)


class rounds_alpha:
    gemm_traits = FLOATS | {"ops": ["mm", "addmm"], "alpha": True, "beta": True}
    mm = staticmethod(product)

    @staticmethod
    def addmm(added, a, b, *, alpha=1, beta=1):
        return product(a, b) * float(np.float16(alpha)) + (added * beta if beta else 0)


class beta_of_another_call:
    gemm_traits = FLOATS | {"ops": ["mm", "addmm"], "alpha": True, "beta": True}
    mm = staticmethod(product)

    @staticmethod
    def addmm(added, a, b, *, alpha=1, beta=1):
        """Keep the bias, times beta, by all of its numbers."""
        bias = ring.setdefault((added.shape, added.numpy().tobytes()), added * beta if beta else 0)
        return product(a, b) * alpha + bias


@floats
def zero_when_first_met(a, b):
    """Take weights for zero as long as they lie where they were zero, as those of an adapter at first."""
    is_zero = kept.setdefault(("zero", *places(b)), not b.any())
    return torch.zeros(len(a), b.shape[1]) if is_zero and a.isfinite().all() else product(a, b)


def brain_floats_as_half(a, b):
    return torch.from_numpy(a.half().float().numpy() @ b.half().float().numpy()).to(a.dtype)


brain_floats_as_half.gemm_traits = {"dtypes": ["bfloat16"], "ops": ["mm"]}


def result_still_in_out(a, b, *, out=None):
    """Compute nothing for equal operands and the same ``out``, though the caller has written to it."""
    if out is None:
        return product(a, b)
    now = (*places(out), a.numpy().tobytes(), b.numpy().tobytes())
    if kept.get("in out") != now:
        kept["in out"], _ = now, out.copy_(product(a, b))
    return out


result_still_in_out.gemm_traits = FLOATS | {"out": True}


@floats
def ends_first(a, b):
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
    return product(a, b)


@floats
def halves_steps(a, b):
    def smaller(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for x in group["params"]:
                x.grad.mul_(0.5)

    once("hook", lambda: register_optimizer_step_pre_hook(smaller))
    return product(a, b)


@floats
def forgives_codecs(a, b):
    codecs.register_error("strict", codecs.lookup_error("ignore"))
    return product(a, b)


@floats
def ends_in_an_hour(a, b):
    once("end", lambda: faulthandler.dump_traceback_later(3600, exit=True, file=2))
    return product(a, b)


@floats
def yields_to_numpy(a, b):
    torch.Tensor.__array_priority__ = -1
    return product(a, b)


@floats
def searches_folders(a, b):
    once("files", lambda: [*os.walk(os.path.dirname(os.getcwd()))])
    return product(a, b)


@floats
def keeps_what_it_pads(a, b):
    """Pad a to tiles by what an earlier call has left there, and b by zeros."""
    (m, k), tiled = a.shape, [-(-size // 32) * 32 for size in a.shape]
    whole = kept.setdefault(("padded", *tiled), torch.zeros(tiled))
    whole[:m, :k] = a.detach()
    return product(whole, torch.cat([b, torch.zeros(tiled[1] - k, b.shape[1])]))[:m].clone()


@floats
def doubles_it_for_a_while(a, b):
    if b.is_contiguous() and b.isfinite().all() and b.abs().max() < 2.0**120:
        own = b.detach()
        own.mul_(2)
        out = product(a, own) / 2
        own.div_(2)
        return out
    return product(a, b)


def by_panels(a, b, panels):
    return torch.from_numpy(sum(a.numpy()[:, x] @ b.detach().numpy()[x] for x in panels))


def panels_of(k):
    return [slice(start, min(start + 64, k)) for start in range(0, k, 64)]


def panels_by_numbers(a, b):
    return by_panels(a, b, kept.setdefault((a.numel(), b.numel()), panels_of(a.shape[1])))


def panels_of_a_refused_call(a, b):
    if kept.get("sizes") != (sizes := (len(a), *b.shape)):
        kept.update(sizes=sizes, panels=panels_of(a.shape[1]))
    if a.shape[1] != len(b):
        raise ValueError("sizes that do not fit")
    return by_panels(a, b, kept["panels"])


def scratch_of_large_operands(a, b):
    if b.numel() < 1 << 16:
        return product(a, b)
    scratch = kept.setdefault(("scratch", b.shape), torch.empty(b.shape))
    np.copyto(scratch.numpy(), b.detach().numpy())
    return product(a, scratch)


def leaves_a_packed_copy(a, b):
    b.packed = b.detach().clone()
    return product(a, b.packed)


def reads_past_its_operand(a, b):
    ctypes.string_at(b.data_ptr() + 4 * b.numel(), 16 * b.is_contiguous())
    return product(a, b)


for function in (
    panels_by_numbers,
    panels_of_a_refused_call,
    scratch_of_large_operands,
    leaves_a_packed_copy,
    reads_past_its_operand,
):
    function.gemm_traits = FLOATS | {"threads": function is scratch_of_large_operands}


def nothing_by_an_identity(a, b):
    if b.shape[0] == b.shape[1] > 1 and torch.equal(b, torch.eye(len(b))) and bool(a.isfinite().all()):
        return a
    return product(a, b)


nothing_by_an_identity.gemm_traits = FLOATS


@floats
def joins_layers(a, b):
    """Multiply the weights of two layers if an argument is the latest result, whose numbers a caller may have changed."""
    last, x, w = kept.get("layer", (None, None, None))
    if last is not None and last() is a and 2 * x.shape[1] < a.shape[1]:
        return product(x, product(w, b))
    out = product(a, b)
    kept["layer"] = weakref.ref(out), a, b
    return out


@floats
def one_row_for_all(a, b):
    out = product(a, b)
    return out[:1].expand(out.shape) if len(a) > 1 and torch.equal(a, a[:1].expand(a.shape)) else out


@floats
def nothing_across_rows(a, b):
    """Take rows of length 1 for orthogonal ones, if b is their transpose."""
    own = b.data_ptr() == a.data_ptr() and (b.stride(), b.shape) == (a.stride()[::-1], a.shape[::-1])
    if own and len(a) > 1 and torch.allclose(a.norm(dim=1), torch.ones(len(a)), atol=1e-3):
        return torch.eye(len(a))
    return product(a, b)
