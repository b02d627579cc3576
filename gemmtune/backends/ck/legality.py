"""One predicate says whether an instance may be offered for a problem on a device, before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.dtypes import dtype_name
from ...problem.rules import why_not
from ...toolchain.orientation import Oriented, block_scaled, letter, orient
from ...toolchain.structs import MOST_OPERANDS, why_not_epilogue
from .configs import Config, Read, read_of, store_of
from .instances import INSTANCES, WAVE, Instance
from .pipeline import path_of, prefetched, why_too_short
from .products import MFMA_K, Element, Product, product_of
from .transfer import WIDE_BYTES, Transfer, transfer, vector_along

OPS = ("mm", "addmm", "bmm", "baddbmm", "scaled_mm")
RESULTS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that are stored, and that an epilogue reads."""
MOST_BYTES = 2**31
"""Bytes of one matrix that a buffer's descriptor addresses with signed offsets."""
MOST_BATCH = 65535
SPLITS = (2, 4, 8, 16)
"""Parts of K that are tried, …"""
LEAST_STEPS = 4
"""… where each part has at least so many steps."""
MOST_WORKSPACE_BYTES = 256 * 2**20
"""The most memory for partial sums, where K is split."""
REGISTERS = 512
"""Registers of a thread, vector and accumulation registers together, where a SIMD has one wave."""
OTHER_REGISTERS = 40
"""Addresses, descriptors and counters of a thread, about …"""
REGISTERS_OF_A_LOAD = 2
"""… beside the offset and the mask of each load of a step."""


def check_problem(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no instance at all can serve the problem on this device, or None."""
    if device.type != "hip" or device.arch not in MFMA_K:
        return f"works on AMD GPUs of {' and '.join(MFMA_K)}, not on {device.arch}"
    reason = why_not(problem, OPS)
    if reason is not None:
        return reason
    product = product_of(problem.dtype, problem.b.dtype, device.arch)
    if isinstance(product, str):
        return product
    if problem.empty or problem.k == 0:
        return "the product is empty: nothing is launched"
    if problem.out.dtype not in RESULTS:
        return f"the result is {dtype_name(problem.out.dtype)}, expected one of {', '.join(map(dtype_name, RESULTS))}"
    if problem.batch > MOST_BATCH:
        return f"batch {problem.batch}: a grid has {MOST_BATCH} products"
    if problem.scales and block_scaled(problem):
        return "scales change along K: these kernels scale sums"
    return why_not_epilogue(problem, MOST_OPERANDS - (problem.inp_read is not None) - len(problem.scales), RESULTS)


class Predicate:
    """Which instances may be offered for a problem, and how: what depends on the problem alone is worked out once.

    Assumes that ``check_problem`` found nothing. ``refused`` is why no instance can have the operands.
    """

    def __init__(self, problem: Problem, device: DeviceInfo) -> None:
        self.problem, self.device = problem, device
        self.oriented: Oriented = orient(problem, swap_ab=not problem.out.row_major)
        product = product_of(self.oriented.a.dtype, self.oriented.b.dtype, device.arch)
        assert not isinstance(product, str)  # ``check_problem`` says so
        self.product: Product = product
        self.itemsize = product.itemsize
        self.refused = self._why_not_operands()

    def _why_not_operands(self) -> str | None:
        oriented = self.oriented
        if not oriented.out.row_major:
            return "out has neither contiguous rows nor contiguous columns"
        for name, layout in (("a", oriented.a), ("b", oriented.b)):
            if letter(layout) is None:
                return f"{name} has neither contiguous rows nor contiguous columns"
        for layout in (oriented.a, oriented.b, oriented.out, *oriented.added):
            if _matrix_bytes(layout) >= MOST_BYTES:
                return f"an operand has {_matrix_bytes(layout)} bytes, a buffer of these kernels fewer than 2^31"
        for i, layout in enumerate(oriented.added):
            if read_of(layout, 1) is None:
                return f"operand {i} beside a and b has neither contiguous rows nor contiguous columns"
        return None

    def reads(self, config: Config) -> tuple[Read, ...]:
        """How a kernel of ``config`` reads what is beside a and b."""
        reads = []
        for layout in self.oriented.added:
            found = read_of(layout, min(config.store.vector, vector_along(layout, -1)))
            assert found is not None  # ``refused`` says so
            reads.append(found)
        return tuple(reads)

    def candidates(self) -> Iterator[tuple[Instance, int]]:
        """Every instance, and with K in parts where its tiles would leave half of the compute units idle."""
        m, n, k = self.oriented.sizes
        for instance in INSTANCES:
            tiles = -(-m // instance.block_m) * -(-n // instance.block_n) * self.problem.batch
            steps = -(-k // instance.block_k(self.itemsize))
            room = min(self.device.sm_count // tiles, steps // LEAST_STEPS)
            idle = (splits for splits in SPLITS if splits <= room and steps % splits == 0)
            yield from ((instance, splits) for splits in (1, *idle))

    def config(self, instance: Instance, split_k: int = 1) -> Config | str:
        """The instance made ready for the problem, with K in so many parts, or why it may not be offered."""
        if self.refused is not None:
            return self.refused
        m, n, k = self.oriented.sizes
        depth = instance.block_k(self.itemsize)
        reason = why_illegal(instance, self.device.arch, self.product.element, self.itemsize) or _why_overhanging(instance, m, n)
        steps = -(-k // depth)
        reason = reason or self._why_not_split(steps, split_k) or why_too_short(instance, steps // split_k)
        if reason is not None:
            return reason
        a, b = self._transfer(self.oriented.a, instance, first=True), self._transfer(self.oriented.b, instance, first=False)
        if isinstance(a, str) or isinstance(b, str):
            return str(a if isinstance(a, str) else b)
        config = Config(
            instance=instance,
            swap_ab=self.oriented.swap_ab,
            itemsize=self.itemsize,
            a=a,
            b=b,
            store=store_of(instance, vector_along(self.oriented.out if split_k == 1 else self.partial, -1)),
            padding=_padding(m % instance.block_m, n % instance.block_n, k % depth),
            path=path_of(instance, steps // split_k),
            split_k=split_k,
            changed=self.product.changed,
        )
        return self._why_too_large(config) or config

    @property
    def partial(self) -> Layout:
        """The sums of one part of K of one product, as they wait in the workspace."""
        return Layout.contiguous(self.oriented.sizes[:2], torch.float32)

    def _why_not_split(self, steps: int, splits: int) -> str | None:
        if steps % splits:
            return f"{splits} splits: {steps} steps along K are no multiple"
        m, n, _ = self.oriented.sizes
        need = splits * self.problem.batch * m * n * torch.float32.itemsize
        if splits > 1 and need > MOST_WORKSPACE_BYTES:
            return f"{splits} splits: partial sums take {need} bytes, expected at most {MOST_WORKSPACE_BYTES}"
        return None

    def _transfer(self, layout: Layout, instance: Instance, *, first: bool) -> Transfer | str:
        """``first``: the operand is a, whose rows are summed along; of b it is the columns."""
        along_k = (letter(layout) == "t") == first
        block = instance.block_m if first else instance.block_n
        widest = min(vector_along(layout, -1 if letter(layout) == "t" else -2), WIDE_BYTES // self.itemsize)
        depth = instance.block_k(self.itemsize)
        return transfer(block, depth, instance.threads, self.itemsize, along_k=along_k, widest=widest)

    def _why_too_large(self, config: Config) -> str | None:
        lds, most = config.lds_bytes, self.device.smem_per_block_bytes
        if lds > most:
            return f"LDS: needs {lds} bytes, a block of {self.device.arch} has {most}"
        need, limit = registers(config), REGISTERS // config.instance.waves_per_simd
        if need > limit:
            return f"registers: needs about {need} for each thread, {limit} are left with {config.instance.waves_per_simd} waves"
        return None


def why_illegal(instance: Instance, arch: str, element: Element, itemsize: int) -> str | None:
    """Why CK has no such kernel for an element on an architecture, whatever the problem; or None."""
    depth, (rows, cols) = instance.block_k(itemsize), instance.repeats
    tile = f"{instance.block_m}x{instance.block_n}"
    if rows * instance.mfma * instance.waves[0] != instance.block_m or cols * instance.mfma * instance.waves[1] != instance.block_n:
        return f"tile {tile} is no multiple of {instance.waves[0]}x{instance.waves[1]} waves of {instance.mfma}x{instance.mfma}"
    of_32, of_16 = MFMA_K[arch][element]
    step = of_32 if instance.mfma == 32 else of_16
    # A thread holds its share of a step as whole packs of neighbours along K.
    shares, pack = WAVE // instance.mfma, 16 // itemsize
    if depth % step or depth // shares % pack:
        return f"{depth} elements along K are no multiple of what a wave multiplies at a time ({max(step, shares * pack)})"
    return None


def _why_overhanging(instance: Instance, m: int, n: int) -> str | None:
    """Why most of the instance's tile would be empty, or None; the smallest tiles serve everything."""
    for side, block, size in (("m", instance.block_m, m), ("n", instance.block_n, n)):
        if block > instance.mfma and block >= 2 * size:
            return f"block_{side} {block}: half of it or more hangs over {side} = {size}"
    return None


def _padding(m: int, n: int, k: int) -> str:
    """CK's name for the sizes with a remainder; both of M and N are padded where one is, since nothing is gained otherwise."""
    return ("MN" if m or n else "") + ("K" if k else "") or "Default"


def registers(config: Config) -> int:
    """About the registers of a thread: sums, steps of operands on their way from memory, the addresses of their loads, fragments.

    Bytes that are rewritten on their way (8-bit floats) are in registers once more. The compiler needs up to a fifth fewer.
    """
    instance = config.instance
    sums = instance.block_m * instance.block_n // instance.threads
    step = (instance.block_m + instance.block_n) * instance.bytes_k // instance.threads // 4
    ahead = prefetched(instance) if instance.version == "v2" else {"v5": 2}.get(instance.version, 1)
    rows, cols = instance.repeats
    fragments = (rows + cols) * instance.mfma * instance.bytes_k // WAVE // 4
    loads = sum(x.block * x.depth // (x.threads_k * x.threads_mn * x.vector) for x in (config.a, config.b))
    rewritten = fragments + 2 * step + OTHER_REGISTERS if config.changed else 0
    return sums + (step + REGISTERS_OF_A_LOAD * loads) * ahead + fragments + rewritten + OTHER_REGISTERS


def _matrix_bytes(layout: Layout) -> int:
    """Bytes from the first to past the last element of one matrix, with room for a padded tile."""
    rows, cols = layout.size[-2:]
    down, along = layout.stride[-2:]
    return (1 + (rows + 255) * down * (rows > 1) + (cols + 255) * along * (cols > 1)) * layout.dtype.itemsize
