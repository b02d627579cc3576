"""Block-sparse weights: tensors to try things with, what is known of parameters of torch's kernels, and a search for such."""

from ..backends.aten.metas import Family, Found, MetaTable, Shape
from ..backends.aten.metas import torch_table as import_torch_meta
from .search import Minimum, minimize
from .tensors import create_blocked_tensor

__all__ = ["Family", "Found", "MetaTable", "Minimum", "Shape", "create_blocked_tensor", "import_torch_meta", "minimize"]
