"""Block-sparse weights: example tensors, linear layers, scattered products, and parameters of torch's kernel with their search."""

from ..backends.aten.metas import Family, Found, MetaTable, Shape
from ..backends.aten.metas import torch_table as import_torch_meta
from .learned import measured_metas
from .minimize import Minimum, minimize
from .products import linear
from .scatter import bsr_scatter_mm, scatter_mm
from .tensors import create_blocked_tensor

__all__ = [
    "Family", "Found", "MetaTable", "Minimum", "Shape", "bsr_scatter_mm", "create_blocked_tensor", "import_torch_meta", "linear",
    "measured_metas", "minimize", "scatter_mm",
]  # fmt: skip
