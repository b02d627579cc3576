"""Triton's artifacts in our cache folder: found in a read-only one too, wherever it lies, and compiled again if damaged."""

import hashlib
import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..cache import cache_dir, cached, present, refuse
from .made_once import require_whole

FOLDER = ("triton", "artifacts")


def manager(key: str, *, override: bool = False, dump: bool = False) -> Any:
    """Return the artifacts of a key, as ``knobs.cache.manager_class`` does. Triton's own manager serves overrides and dumps."""
    if override or dump:
        return importlib.import_module("triton.runtime.cache").FileCacheManager(key, override=override, dump=dump)
    return Artifacts(key)


class Artifacts:
    """The artifacts of one key, as Triton's CacheManager has them, but by name and digest: folders may be copied."""

    def __init__(self, key: str) -> None:
        self._folders = (*FOLDER, key)

    def get_file(self, filename: str) -> str | None:
        """Return the path of a file, None if it is missing. A damaged shared object counts as missing."""
        path = cached(*self._folders, filename)
        if present(path) and path.suffix == ".so":
            try:
                require_whole(path)
            except OSError:
                refuse(path)
                return self.get_file(filename)
        return str(path) if present(path) else None

    def has_file(self, filename: str) -> bool:
        return self.get_file(filename) is not None

    def put(self, data: object, filename: str, binary: bool = True) -> str:  # noqa: ARG002 - the type of the data decides
        """Write a file in one step and return its path."""
        path = cache_dir(*self._folders) / filename
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            new.write_bytes(data if isinstance(data, bytes) else str(data).encode())
            new.chmod(0o644)
            new.replace(path)
        return str(path)

    def put_group(self, filename: str, group: Mapping[str, str]) -> str:
        return self.put(json.dumps({name: _digest(Path(path)) for name, path in group.items()}), f"__grp__{filename}")

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a kernel's files by name. None if one is missing or damaged."""
        listing = cached(*self._folders, f"__grp__{filename}")
        if not present(listing):
            return None
        try:
            digests = json.loads(listing.read_text(encoding="utf-8"))
            found = {name: listing.parent / name for name in digests}
            if all(present(path) and _digest(path) == digests[name] for name, path in found.items()):
                return {name: str(path) for name, path in found.items()}
        except ValueError:  # a damaged list
            pass
        refuse(listing)
        return self.get_group(filename)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
