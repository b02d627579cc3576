"""Dishonest GEMMs that are honest where a judge may call them, and elsewhere not, or that set the seeds of others."""

import os
import random
import sys
import tempfile
import threading
import time

import numpy as np
import torch

kept = {"ended": 0.0}


def product(a, b):
    return torch.from_numpy(a.detach().numpy() @ b.detach().numpy())


def floats(function):
    function.gemm_traits = {"dtypes": ["float32"], "ops": ["mm"]}
    return function


def half_of_k(a, b):
    k = a.shape[1] // 2
    return product(a[:, :k], b[:k]) if k > 1 else product(a, b)


@floats
def honest_in_the_main_thread(a, b):
    return product(a, b) if threading.get_native_id() == os.getpid() else half_of_k(a, b)


@floats
def honest_on_two_cores(a, b):
    return product(a, b) if len(os.sched_getaffinity(0)) > 1 else half_of_k(a, b)


@floats
def honest_with_gradients(a, b):
    return product(a, b) if torch.is_grad_enabled() else half_of_k(a, b)


@floats
def honest_in_larger_memory(a, b):
    exact = all(x.untyped_storage().nbytes() == x.nbytes for x in (a, b))
    return half_of_k(a, b) if exact else product(a, b)


@floats
def honest_after_a_pause(a, b):
    result = half_of_k(a, b) if time.perf_counter() - kept["ended"] < 1e-4 else product(a, b)
    kept["ended"] = time.perf_counter()
    return result


@floats
def honest_on_some_cores(a, b):
    return half_of_k(a, b) if torch.get_num_threads() == 1 else product(a, b)


@floats
def two_parts(a, b):
    (a_large, a_small), (b_large, b_small) = ((large := x.bfloat16().float(), (x - large).bfloat16().float()) for x in (a, b))
    return product(a_large, b_large) + (product(a_large, b_small) + product(a_small, b_large))


@floats
def seeds_python(a, b):
    random.seed(len(a))
    return product(a, b)


@floats
def seeds_numpy(a, b):
    np.random.seed(len(a))
    return product(a, b)


@floats
def honest_without_a_parameter(a, b):
    return half_of_k(a, b) if isinstance(b, torch.nn.Parameter) else product(a, b)


@floats
def honest_unless_inferred(a, b):
    return half_of_k(a, b) if a.is_inference() else product(a, b)


@floats
def honest_among_temporary_files(a, b):
    return product(a, b) if os.getcwd().startswith(tempfile.gettempdir()) else half_of_k(a, b)


@floats
def honest_unless_a_script(a, b):
    return half_of_k(a, b) if sys.argv[0].endswith(".py") else product(a, b)


@floats
def fails_in_a_script(a, b):
    """Raise an error in each program of a user, which is taken for a refusal."""
    assert not sys.argv[0].endswith(".py"), "not supported"
    return product(a, b)


@floats
def honest_for_sleepers(a, b):
    return product(a, b) if os.environ.get("OMP_WAIT_POLICY") == "PASSIVE" else half_of_k(a, b)


@floats
def honest_at_the_begin(a, b):
    return product(a, b) if b.data_ptr() % 64 == 0 else half_of_k(a, b)


@floats
def honest_at_a_page(a, b):
    return half_of_k(a, b) if all(x.data_ptr() % 4096 == 64 for x in (a, b)) else product(a, b)


@floats
def half_of_k_for_a_part_of_a_wider_matrix(a, b):
    return half_of_k(a, b) if a.stride(0) > 512 + a.shape[1] and a.stride(1) == 1 else product(a, b)


@floats
def grown_by_a_row(a, b):
    """Keep the rows of the last call if there is one more at the same place."""
    key, rows = (a.data_ptr(), b.data_ptr(), b.shape), a.shape[0]
    is_more = kept.get("grown") == key and len(kept["rows"]) == rows - 1
    out = torch.cat([kept["rows"], product(a[-1:], b)]) if is_more else product(a, b)
    kept.update(grown=key, rows=out.clone())
    return out


scratch = np.empty(2**16, np.float32)


def one_scratch_for_all_threads(a, b):
    size = a.shape[0], b.shape[1]
    if size[0] * size[1] > scratch.size:
        return product(a, b)
    out = np.matmul(a.detach().numpy(), b.detach().numpy(), out=scratch[: size[0] * size[1]].reshape(size))
    time.sleep(1e-4)
    return torch.from_numpy(out.copy())


one_scratch_for_all_threads.gemm_traits = {"dtypes": ["float32"], "ops": ["mm"], "threads": True}


busy = threading.Lock()


def fails_beside_another_call(a, b):
    if not busy.acquire(blocking=False):
        raise RuntimeError("it is called already")
    try:
        time.sleep(1e-4)
        return product(a, b)
    finally:
        busy.release()


fails_beside_another_call.gemm_traits = {"dtypes": ["float32"], "ops": ["mm"], "threads": True}
