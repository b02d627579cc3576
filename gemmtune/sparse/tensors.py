"""Block-sparse tensors of a given size and density, for tests and measurements."""

import torch

from ..errors import InvalidProblemError
from ..numerics.block_sparse import assembled, random_mask
from ..problem.dtypes import dtype_info, dtype_name
from ..problem.operations import OPERATIONS
from ..problem.sparsity import Imbalance, Sparsity, density_class, sides_of


def create_blocked_tensor(
    m: int,
    k: int,
    *,
    block: int | tuple[int, int] = 64,
    density: float = 0.5,
    imbalance: Imbalance = "even",
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> torch.Tensor:
    """Return a sparse_bsr tensor [M, K] with random blocks of random numbers.

    Args:
        block: the side of a block, or (rows, columns), which divide M and K.
        density: the share of blocks that exist. Each block row has the same number (rounded). With ``imbalance="skewed"`` the
            numbers follow a power law, in random order.
        dtype: dtype of the values. They are standard normal, or for int8 uniform over its range.
        index_dtype: int32 or int64.
        seed: seed of separate generators, so that torch's global state does not change. The pattern is equal on every device.

    Raises:
        InvalidProblemError: the blocks do not divide the matrix, the density is illegal, or no product takes the dtype.
    """
    block_n, block_k = sides_of(block)
    _refuse((m, k), (block_n, block_k), density, dtype, index_dtype)
    drawing = torch.Generator("cpu").manual_seed(seed)
    generator = drawing if torch.device(device).type == "cpu" else torch.Generator(device=device).manual_seed(seed)
    sparsity = Sparsity(block_n=block_n, block_k=block_k, density=density_class(density), imbalance=imbalance)
    mask = random_mask((m, k), sparsity, drawing, density=density).to(device)
    col = mask.nonzero(as_tuple=True)[1]
    shape = (len(col), block_n, block_k)
    if dtype_info(dtype).is_integer:
        bounds = torch.iinfo(dtype)
        values = torch.randint(bounds.min, bounds.max + 1, shape, generator=generator, dtype=dtype, device=device)
    else:
        values = torch.randn(shape, generator=generator, device=device).to(dtype)
    crow = torch.nn.functional.pad(mask.sum(dim=1).cumsum(0), (1, 0))
    return assembled(crow.to(index_dtype), col.to(index_dtype), values, (m, k))


def _refuse(size: tuple[int, int], block: tuple[int, int], density: float, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    """Raise InvalidProblemError if ``create_blocked_tensor`` cannot make such a tensor."""
    (m, k), (block_n, block_k) = size, block
    if index_dtype not in (torch.int32, torch.int64):
        raise InvalidProblemError(f"create_blocked_tensor: index_dtype: got {index_dtype}, expected torch.int32 or torch.int64")
    if not 0 <= density <= 1:
        raise InvalidProblemError(f"create_blocked_tensor: density: got {density}, expected a number from 0 to 1")
    if dtype not in OPERATIONS["bsr_mm"].operands[0].dtypes:
        expected = ", ".join(map(dtype_name, OPERATIONS["bsr_mm"].operands[0].dtypes))
        raise InvalidProblemError(f"create_blocked_tensor: dtype: got {dtype}, expected one of {expected}")
    if min(m, k) < 0 or m % block_n or k % block_k:
        raise InvalidProblemError(f"create_blocked_tensor: blocks of {block_n}x{block_k} do not divide a matrix of {m}x{k}")
