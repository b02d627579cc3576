"""Attention of one query in a compiled graph: two products with a softmax between, which one pair of kernels does.

A decoding step has such attention. torch's kernels have a block for each head, which leaves most of a GPU idle, and want the
heads of the keys repeated for the query heads that share them, which copies the cache.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...device import DeviceInfo
from ...store.key import canonical
from .epilogues import VIEWS
from .planned_attention import OPERATOR

aten = torch.ops.aten

OPERATORS = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""What torch's scaled_dot_product_attention becomes in a graph. The first result of each is the attention."""
MOST_WIDTH, MOST_GROUP = 256, 64
"""Maximum elements of a head, and query heads of a head of the keys, whose tiles fit into shared memory and registers."""
MOST_SPLITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Parameters of the kernels: parts of the keys, keys of a step, and warps of a block."""

    splits: int
    block: int
    warps: int

    def __str__(self) -> str:
        return f"attend_s{self.splits}_b{self.block}_w{self.warps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention of one query. ``tensors`` are the query, keys and values without repeated heads, and the bias if there is one."""

    node: fx.Node
    tensors: tuple[fx.Node, ...]
    scale: float

    @property
    def values(self) -> list[torch.Tensor]:
        """The example values of ``tensors``."""
        return [x.meta["val"] for x in self.tensors]

    @property
    def key(self) -> str:
        """The key in the store: torch's operator, and the layouts of what it and what ours would read."""
        read = [x.meta["val"] for x in (*self.node.all_input_nodes, *self.tensors)]
        layouts = [[str(x.dtype), list(x.shape), list(x.stride())] for x in read]
        return canonical({"attention": str(self.node.target), "layouts": layouts})

    def __str__(self) -> str:
        (batch, heads, _, width), (_, key_heads, keys, _) = (x.shape for x in self.values[:2])
        dtype = str(self.values[0].dtype).removeprefix("torch.")
        return f"attention {batch}x{heads}x1x{width} {dtype} over {keys} keys of {key_heads} heads"

    def configs(self, device: DeviceInfo) -> list[Config]:
        """Return the configs to compare. They fill the multiprocessors about half, once and twice."""
        (batch, key_heads, keys, _) = self.values[1].shape
        found: dict[Config, None] = {}
        for block, warps, fill in ((64, 4, 1.0), (64, 4, 0.5), (64, 4, 2.0), (32, 4, 1.0), (64, 8, 1.0), (64, 8, 0.5)):
            wanted = max(1, round(fill * (device.sm_count or 1) / (batch * key_heads)))
            splits = min(1 << (wanted.bit_length() - 1), MOST_SPLITS, -(-keys // block))
            found[Config(splits=splits, block=block, warps=warps)] = None
        return list(found)

    def replace(self, config: Config) -> None:
        """Replace torch's attention by ours."""
        graph, value = self.node.graph, self.values[0]
        numbers = {"splits": config.splits, "block": config.block, "warps": config.warps}
        with graph.inserting_before(self.node):
            new = graph.call_function(OPERATOR, (list(self.tensors),), {"scale": self.scale, **numbers})
            new.meta["val"] = value.new_empty(value.shape)
        for user in list(self.node.users):
            user.replace_all_uses_with(new)
            graph.erase_node(user)
        graph.erase_node(self.node)


def attention_of(nodes: Iterable[fx.Node]) -> Iterator[Attention]:
    """Yield the attention that the kernels can do: one query, no dropout, contiguous rows, and only the result is read."""
    for node in nodes:
        if node.target not in OPERATORS or any(user.args[1] != 0 for user in node.users):
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
        q, k, v = (given[name] for name in ("query", "key", "value"))
        bias = given.get("attn_bias", given.get("attn_mask"))
        shared = [_unrepeated(x) for x in (k, v)]
        k, v = shared if len({x.meta["val"].shape[1] for x in shared}) == 1 else (k, v)
        tensors = (q, k, v) if bias is None else (q, k, v, _unexpanded(bias))
        if given.get("dropout_p") or given.get("is_causal") or not _is_served([x.meta["val"] for x in tensors]):
            continue
        scale = given.get("scale")
        yield Attention(node=node, tensors=tensors, scale=q.meta["val"].shape[-1] ** -0.5 if scale is None else scale)


def _is_served(values: list[torch.Tensor]) -> bool:
    q, k, v = values[:3]
    if any(x.dim() != 4 or not all(isinstance(n, int) for n in (*x.shape, *x.stride())) for x in values):
        return False
    (batch, heads, queries, width), (_, key_heads, keys, _) = q.shape, k.shape
    fits = queries == 1 and width <= MOST_WIDTH and key_heads > 0 and heads % key_heads == 0 and heads // key_heads <= MOST_GROUP
    same = k.shape == v.shape == (batch, key_heads, keys, width) and q.dtype == k.dtype == v.dtype
    rows = all(x.stride(-1) == 1 for x in (q, k, v))
    return fits and same and rows and batch * keys > 0 and (q.device.type == "cpu" or q.dtype in (torch.float16, torch.bfloat16))


def _unrepeated(node: fx.Node) -> fx.Node:
    """Return the heads that a tensor [batch, heads, keys, width] repeats, each for adjacent queries, or the tensor itself."""
    copied: Any = node.args[0] if node.target in VIEWS else None
    copied = copied.args[0] if isinstance(copied, fx.Node) and copied.target is aten.clone.default else copied
    if not isinstance(copied, fx.Node) or copied.target is not aten.expand.default or node.meta["val"].dim() != 4:
        return node
    inserted: Any = copied.args[0]
    if inserted.target is not aten.unsqueeze.default or inserted.args[1] not in (2, -3):
        return node
    (batch, heads, keys, width), source = node.meta["val"].shape, inserted.args[0]
    *before, group, _, _ = copied.meta["val"].shape
    same = source.meta["val"].shape == (*before, keys, width) and [*before] == [batch, heads // group] and heads % group == 0
    return source if same else node


def _unexpanded(bias: fx.Node) -> fx.Node:
    source: Any = bias
    while source.target is aten.expand.default and source.args[0].meta["val"].dim() == 4:
        source = source.args[0]
    return source  # type: ignore[no-any-return]
