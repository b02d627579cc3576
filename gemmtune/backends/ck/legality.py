"""Legality predicate: may an instance be offered for a problem on a device? It decides before anything is compiled."""

from collections.abc import Iterator

import torch

from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.dtypes import dtype_name
from ...problem.rules import why_not
from ...toolchain.orientation import Oriented, letter, orient, why_not_scaled_sums
from ...toolchain.structs import MOST_OPERANDS, why_not_epilogue
from . import configs
from .configs import Config, Read, Transfer, path_of, prefetched, read_of, store_of, transfer, vector_along, why_too_short
from .instances import INSTANCES, WAVE, Instance
from .products import MFMA_K, Element, Product, product_of

OPS = ("mm", "addmm", "bmm", "baddbmm", "scaled_mm")
RESULTS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that can be stored, and that an epilogue can read."""
MOST_BYTES = 2**31
"""Limit on the bytes of one matrix: a buffer descriptor addresses it with signed 32-bit offsets."""
MOST_BATCH = 65535
SPLITS = (2, 4, 8, 16)
"""Numbers of parts of K to try."""
LEAST_STEPS = 4
"""Minimum steps in each part of K."""
MOST_WORKSPACE_BYTES = 256 * 2**20
"""Most bytes of partial sums with split K."""
REGISTERS = 512
"""Registers of a thread (vector and accumulation registers) with one wave per SIMD."""
OTHER_REGISTERS = 40
"""Estimated registers of a thread for addresses, descriptors and counters."""
REGISTERS_OF_A_LOAD = 2
"""Registers for the offset and the mask of each load of a step."""


def check_problem(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why no instance can serve the problem on this device, or None."""
    if device.type != "hip" or device.arch not in MFMA_K:
        return f"works on AMD GPUs of {' and '.join(MFMA_K)}, not on {device.arch}"
    if (reason := why_not(problem, OPS)) is not None:
        return reason
    product = product_of(problem.dtype, problem.b.dtype, device.arch)
    if isinstance(product, str):
        return product
    if problem.empty or problem.k == 0:
        return "the product is empty: nothing is launched"
    if problem.out.dtype not in RESULTS:
        return f"the result is {dtype_name(problem.out.dtype)}, expected one of {', '.join(map(dtype_name, RESULTS))}"
    if problem.batch > MOST_BATCH:
        return f"batch {problem.batch}: a grid has at most {MOST_BATCH} products"
    most = MOST_OPERANDS - (problem.inp_read is not None) - len(problem.scales)
    return why_not_scaled_sums(problem) or why_not_epilogue(problem, most, RESULTS)


class Predicate:
    """Legal configs for a problem that ``check_problem`` accepts, on a device. ``refused``: why no instance takes the operands."""

    def __init__(self, problem: Problem, device: DeviceInfo) -> None:
        self.problem, self.device = problem, device
        self.oriented: Oriented = orient(problem, swap_ab=not problem.out.row_major)
        product = product_of(self.oriented.a.dtype, self.oriented.b.dtype, device.arch)
        assert not isinstance(product, str)  # guaranteed by ``check_problem``
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
                return f"an operand has {_matrix_bytes(layout)} bytes, expected fewer than 2^31"
        for i, layout in enumerate(oriented.added):
            if read_of(layout, 1) is None:
                return f"operand {i} after a and b has neither contiguous rows nor contiguous columns"
        return None

    def reads(self, config: Config) -> tuple[Read, ...]:
        """Return how a kernel of ``config`` reads the operands other than a and b."""
        reads = []
        for layout in self.oriented.added:
            found = read_of(layout, min(config.store.vector, vector_along(layout, -1)))
            assert found is not None  # guaranteed by ``refused``
            reads.append(found)
        return tuple(reads)

    def candidates(self) -> Iterator[tuple[Instance, int]]:
        """Yield every instance, and its split-K variants if its tiles would leave half of the compute units idle."""
        m, n, k = self.oriented.sizes
        for instance in INSTANCES:
            tiles = -(-m // instance.block_m) * -(-n // instance.block_n) * self.problem.batch
            steps = -(-k // instance.block_k(self.itemsize))
            room = min(self.device.sm_count // tiles, steps // LEAST_STEPS)
            idle = (splits for splits in SPLITS if splits <= room and steps % splits == 0)
            yield from ((instance, splits) for splits in (1, *idle))

    def config(self, instance: Instance, split_k: int = 1) -> Config | str:
        """Return the config of an instance for the problem with K in ``split_k`` parts, or why it may not be offered."""
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
        """Layout of the sums of one part of K of one product in the workspace."""
        return Layout.contiguous(self.oriented.sizes[:2], torch.float32)

    def _why_not_split(self, steps: int, splits: int) -> str | None:
        if steps % splits:
            return f"{splits} splits: {steps} steps along K are not a multiple"
        m, n, _ = self.oriented.sizes
        need = splits * self.problem.batch * m * n * torch.float32.itemsize
        if splits > 1 and need > MOST_WORKSPACE_BYTES:
            return f"{splits} splits: partial sums take {need} bytes, expected at most {MOST_WORKSPACE_BYTES}"
        return None

    def _transfer(self, layout: Layout, instance: Instance, *, first: bool) -> Transfer | str:
        """Return the copy of an operand to LDS. ``first`` means a, contiguous along K if row-major; b is so if column-major."""
        along_k = (letter(layout) == "t") == first
        block = instance.block_m if first else instance.block_n
        widest = min(vector_along(layout, -1 if letter(layout) == "t" else -2), configs.WIDE_BYTES // self.itemsize)
        depth = instance.block_k(self.itemsize)
        return transfer(block, depth, instance.threads, self.itemsize, along_k=along_k, widest=widest)

    def _why_too_large(self, config: Config) -> str | None:
        lds, most = config.lds_bytes, self.device.smem_per_block_bytes
        if lds > most:
            return f"LDS: needs {lds} bytes, a block of {self.device.arch} has {most}"
        need, limit = registers(config), REGISTERS // config.instance.waves_per_simd
        if need > limit:
            return f"registers: needs about {need} for each thread, {limit} available with {config.instance.waves_per_simd} waves"
        return None


def why_illegal(instance: Instance, arch: str, element: Element, itemsize: int) -> str | None:
    """Return why CK has no such kernel for an element on an architecture for any problem, or None."""
    depth, (rows, cols) = instance.block_k(itemsize), instance.repeats
    tile = f"{instance.block_m}x{instance.block_n}"
    if rows * instance.mfma * instance.waves[0] != instance.block_m or cols * instance.mfma * instance.waves[1] != instance.block_n:
        return f"tile {tile} is not a multiple of {instance.waves[0]}x{instance.waves[1]} waves of {instance.mfma}x{instance.mfma}"
    of_32, of_16 = MFMA_K[arch][element]
    step = of_32 if instance.mfma == 32 else of_16
    # A thread holds its share of a step in whole packs of elements adjacent along K.
    shares, pack = WAVE // instance.mfma, 16 // itemsize
    if depth % step or depth // shares % pack:
        return f"{depth} elements along K are not a multiple of a wave's step ({max(step, shares * pack)})"
    return None


def _why_overhanging(instance: Instance, m: int, n: int) -> str | None:
    """Return why most of the instance's tile would be empty, or None. The smallest tiles serve everything."""
    for side, block, size in (("m", instance.block_m, m), ("n", instance.block_n, n)):
        if block > instance.mfma and block >= 2 * size:
            return f"block_{side} {block}: half of it or more hangs over {side} = {size}"
    return None


def _padding(m: int, n: int, k: int) -> str:
    """Return CK's name for the sizes with a remainder. M and N are padded together, because padding only one gains nothing."""
    return ("MN" if m or n else "") + ("K" if k else "") or "Default"


def registers(config: Config) -> int:
    """Return an estimate of a thread's registers: sums, operands in flight, addresses of their loads, and fragments.

    Numbers converted on the way to LDS (8-bit floats) take registers a second time. The compiler needs up to a fifth fewer.
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
    """Return the bytes from the first element past the last one of a matrix, with room for a padded tile."""
    rows, cols = layout.size[-2:]
    down, along = layout.stride[-2:]
    return (1 + (rows + 255) * down * (rows > 1) + (cols + 255) * along * (cols > 1)) * layout.dtype.itemsize
