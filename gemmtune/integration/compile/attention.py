"""Attention of one query in a compiled graph: two products with a softmax between, which one pair of kernels does.

A decoding step has such attention. torch's kernels have a block for each head, which leaves most of a GPU idle, and want the
heads of the keys repeated for the query heads that share them, which copies the cache.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...device import DeviceInfo
from ...store.key import canonical
from .epilogues import VIEWS, same_shape
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
PARTS = 8
"""Most parts of the keys for batches of any size: a part for each of 8 heads of keys fills half of a GPU already."""
DYNAMIC_KEYS = 8192
"""Keys that the parts are for if the graph serves any number of them. Parts without keys cost little."""


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
    def dynamic(self) -> bool:
        """True if the graph serves any number of keys."""
        return not isinstance(self.values[1].shape[2], int)

    @property
    def shares_heads(self) -> bool:
        """True if several query heads share a head of the keys, so that torch's operator reads copies of it."""
        return self.values[0].shape[1] > self.values[1].shape[1]

    @property
    def key(self) -> str:
        """The key in the store: torch's operator, and the layouts of what it and what ours would read."""
        read = [x.meta["val"] for x in (*self.node.all_input_nodes, *self.tensors)]
        layouts = [[str(x.dtype), example_numbers(x.shape), example_numbers(x.stride())] for x in read]
        return canonical({"attention": str(self.node.target), "layouts": layouts} | ({"keys": "any"} if self.dynamic else {}))

    def __str__(self) -> str:
        (batch, heads, _, width), (_, key_heads, keys, _) = (x.shape for x in self.values[:2])
        dtype = str(self.values[0].dtype).removeprefix("torch.")
        return f"attention {batch}x{heads}x1x{width} {dtype} over {'any' if self.dynamic else keys} keys of {key_heads} heads"

    def configs(self, device: DeviceInfo) -> list[Config]:
        """Return the configs to compare. They fill the multiprocessors about half, once and twice."""
        (batch, key_heads, keys, _) = self.values[1].shape
        keys = DYNAMIC_KEYS if self.dynamic else keys
        found: dict[Config, None] = {}
        for block, warps, fill in ((64, 4, 1.0), (64, 4, 0.5), (64, 4, 2.0), (32, 4, 1.0), (64, 8, 1.0), (64, 8, 0.5)):
            wanted = max(1, round(fill * (device.sm_count or 1) / (batch * key_heads)))
            splits = min(1 << (wanted.bit_length() - 1), MOST_SPLITS, -(-keys // block))
            found[Config(splits=splits, block=block, warps=warps)] = None
        return list(found)

    @property
    def config_for_any_batch(self) -> Config:
        """The config that depends on the number of keys alone, so that results of a sequence do not depend on its batch."""
        block, keys = 64, self.values[1].shape[2]
        splits = PARTS if self.dynamic else min(PARTS, -(-keys // block))
        return Config(splits=splits, block=block, warps=4)

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
        heads, others = (x.meta["val"].shape[1] for x in shared)
        k, v = shared if statically_known_true(heads == others) else (k, v)
        tensors = (q, k, v) if bias is None else (q, k, v, _unexpanded(bias))
        scale = given.get("scale")
        other = given.get("dropout_p") or given.get("is_causal") or isinstance(scale, fx.Node)
        if other or not _is_served([x.meta["val"] for x in tensors]):
            continue
        yield Attention(node=node, tensors=tensors, scale=q.meta["val"].shape[-1] ** -0.5 if scale is None else scale)


def _is_served(values: list[torch.Tensor]) -> bool:
    """Return True for operands of the kernels. Only the number of keys, and strides along other dimensions, may be dynamic."""
    q, k, v = values[:3]
    if any(x.dim() != 4 for x in values) or not all(isinstance(n, int) for n in (*q.shape, k.shape[1])):
        return False
    (batch, heads, queries, width), (_, key_heads, keys, _) = q.shape, k.shape
    fits = queries == 1 and width <= MOST_WIDTH and key_heads > 0 and heads % key_heads == 0 and heads // key_heads <= MOST_GROUP
    # Dynamic numbers of keys may have two names. The kernels' function refuses unequal ones, as torch's operator does.
    length = keys if isinstance(keys, int) else v.shape[2]
    same = same_shape(k, (batch, key_heads, keys, width)) and same_shape(v, (batch, key_heads, length, width))
    same = same and q.dtype == k.dtype == v.dtype
    rows = all(statically_known_true(x.stride(-1) == 1) for x in (q, k, v))
    some = batch > 0 and statically_known_true(keys > 0)
    return fits and same and rows and some and (q.device.type == "cpu" or q.dtype in (torch.float16, torch.bfloat16))


def example_numbers(sizes: Iterable[int | torch.SymInt]) -> list[int]:
    """Return sizes or strides, with the numbers of the compiled example in place of dynamic ones."""
    return [n if isinstance(n, int) else int(n.node.hint) for n in sizes]


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
    *_, group, _, _ = copied.meta["val"].shape
    if not all(isinstance(n, int) for n in (heads, group)) or heads % group:
        return node
    return source if same_shape(source.meta["val"], (batch, heads // group, keys, width)) else node


def _unexpanded(bias: fx.Node) -> fx.Node:
    source: Any = bias
    while source.target is aten.expand.default and source.args[0].meta["val"].dim() == 4:
        source = source.args[0]
    return source  # type: ignore[no-any-return]
