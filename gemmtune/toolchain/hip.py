"""The HIP runtime, libamdhip64, through ctypes: loads code objects and launches kernels. The first load looks for the library."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import ErrorFromChoice, UnavailableError
from .driver import Library
from .launcher import RecordLauncher
from .record import Record

T = TypeVar("T")

FUNCTIONS: dict[str, list[Any]] = {
    "hipGetDevice": [POINTER(c_int)], "hipSetDevice": [c_int], "hipModuleLoadData": [POINTER(c_void_p), c_char_p],
    "hipModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "hipStreamGetCaptureInfo_v2": [c_void_p, POINTER(c_int), POINTER(c_uint64), c_void_p, c_void_p, c_void_p],
    "hipModuleLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
}  # fmt: skip
"""HIP functions in use, with the types of their arguments. All return a hipError_t, 0 for success."""
LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
"""Names of the library. torch's own copy is tried first: two copies in one process do not know each other's streams."""


class LoadedHipKernel:
    """A kernel of a code object that is loaded on one device."""

    def __init__(self, driver: "Hip", function: int, device: int) -> None:
        self.driver, self.function, self.device = driver, function, device


class Hip(Library):
    """The HIP runtime."""

    title, functions = "the HIP runtime", FUNCTIONS
    lacking = "libamdhip64: got a library without {}, expected ROCm 6 or newer; update ROCm"
    capture_function = "hipStreamGetCaptureInfo_v2"

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        library.hipGetErrorString.argtypes, library.hipGetErrorString.restype = [c_int], c_char_p

    def message(self, status: int) -> str:
        text = self.call.hipGetErrorString(status)
        return f"HIP error {status}" + (f": {text.decode()}" if text else "")

    def load(self, code: bytes, kernel: str, device: int) -> LoadedHipKernel:
        """Load the code object on the device and return its kernel of that name. Raise DamagedError if HIP refuses it."""

        def loaded() -> int:
            module, function = c_void_p(), c_void_p()
            self._require(self.call.hipModuleLoadData(ctypes.byref(module), code))
            self._require(self.call.hipModuleGetFunction(ctypes.byref(function), module, kernel.encode()))
            return function.value or 0

        return LoadedHipKernel(self, self._on(device, loaded), device)

    def _on(self, device: int, do: Callable[[], T]) -> T:
        """Return ``do()``, called while the device is this thread's current one."""
        before = c_int()
        self._require(self.call.hipGetDevice(ctypes.byref(before)))
        self._require(self.call.hipSetDevice(device))
        try:
            return do()
        finally:
            self.call.hipSetDevice(before.value)


@functools.cache
def find_hip() -> Hip:
    """Return the runtime of this machine. Raise UnavailableError if there is none or it is too old."""
    reasons = []
    beside_torch = sorted((Path(torch.__file__).parent / "lib").glob("libamdhip64.so*"))
    for name in (*map(str, beside_torch), *LIBRARIES):
        try:
            return Hip(ctypes.CDLL(name))
        except OSError as error:
            reasons.append(str(error))
    raise UnavailableError(f"the HIP runtime cannot be loaded: {'; '.join(reasons)}; install ROCm, or torch for ROCm")


class HipLauncher(RecordLauncher):
    """Launcher of a code object's kernel."""

    def __init__(self, kernel: LoadedHipKernel, record: Record, refuse: Callable[[str], ErrorFromChoice]) -> None:
        super().__init__(kernel, record, refuse)
        self._launch = kernel.driver.call.hipModuleLaunchKernel
        self._shape = (kernel.function, *record.grid, record.threads, 1, 1, record.shared_bytes)

    def launch(self, stream: int, addresses: tuple[int, ...], alpha: float, beta: float) -> None:
        key = (addresses, alpha, beta)
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = self._filled(addresses, (alpha, beta))
        status = self._launch(*self._shape, stream, ready.arguments, None)
        if status:
            raise self._refuse(self.kernel.driver.message(status))


@functools.lru_cache(maxsize=512)
def loaded_hip_kernel(driver: Hip, path: Path, kernel: str, device: int) -> LoadedHipKernel:
    """Return the kernel of the code object at ``path``, loaded once on a device. Raise UnavailableError if HIP refuses it."""
    return driver.load(path.read_bytes(), kernel, device)
