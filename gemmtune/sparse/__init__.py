"""Block-sparse weights: example tensors, linear layers, scattered products, torch's table of parameters, and a search for some."""

from ..backends.aten.metas import Family, Found, MetaTable, Shape
from ..backends.aten.metas import torch_table as import_torch_meta
from .minimize import Minimum, minimize
from .products import linear
from .scatter import bsr_scatter_mm, scatter_mm
from .tensors import create_blocked_tensor

__all__ = [
    "Family", "Found", "MetaTable", "Minimum", "Shape", "bsr_scatter_mm", "create_blocked_tensor", "import_torch_meta", "linear",
    "minimize", "scatter_mm",
]  # fmt: skip
