"""Composable Kernel's headers on this machine: a checkout, the package amd-aiter, or ROCm."""

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from ...cache import write_once
from ...errors import UnavailableError

HEADER = Path("ck/tensor_operation/gpu/grid/gridwise_gemm_xdl_cshuffle_v3_multi_d.hpp")
CONFIG = Path("ck/config.h")
CONFIG_TEXT = "#pragma once\n" + "".join(
    f"#define CK_ENABLE_{name}\n" for name in ("INT8", "FP8", "BF8", "FP16", "BF16", "FP32", "FP64")
)
"""Header that CK's build would write. It enables every dtype; the dtypes of CK's own libraries do not matter here."""
PACKAGE = "aiter_meta"
REMEDY = (
    "pip install --no-deps amd-aiter, whose package has its headers, or set ck_dir (GEMMTUNE_CK_DIR) to a checkout of Composable "
    "Kernel"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolkit:
    """Copy of CK's headers."""

    version: str
    include: Path

    def includes(self, folder: Path) -> tuple[Path, ...]:
        """Return the folders to search for headers. If the copy has no configuration header, write one below ``folder``."""
        if (self.include / CONFIG).is_file():
            return (self.include,)
        write_once(folder / CONFIG, CONFIG_TEXT)
        return (folder, self.include)


def find_toolkit(checkout: str | None) -> Toolkit:
    """Return the checkout in ``settings.ck_dir``, amd-aiter, or ROCm's headers. Raises UnavailableError with the remedy."""
    if checkout is not None:
        include = Path(checkout) / "include"
        if not (include / HEADER).is_file():
            missing = f"{include / HEADER} is missing"
            raise UnavailableError(f"ck_dir: got {checkout!r}, expected a checkout of Composable Kernel: {missing}")
        return Toolkit(version=f"at {checkout}", include=include)
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        include = Path(folder) / "3rdparty/composable_kernel/include"
        if (include / HEADER).is_file():
            return Toolkit(version=f"of amd-aiter {importlib.metadata.version('amd-aiter')}", include=include)
    if (Path("/opt/rocm/include") / HEADER).is_file():
        return Toolkit(version="of ROCm", include=Path("/opt/rocm/include"))
    raise UnavailableError(f"Composable Kernel is not installed: {REMEDY}")
