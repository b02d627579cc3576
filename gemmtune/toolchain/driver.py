"""The CUDA driver, libcuda, through ctypes: loads cubins, encodes tensor maps, launches kernels."""

import contextlib
import ctypes
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

from ..errors import UnavailableError
from .made_once import DAMAGED, DamagedError
from .record import TensorMap

CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
"""Values of CUlaunchAttributeID."""
MAX_DYNAMIC_SHARED_BYTES = 8
"""Value of CUfunction_attribute."""
INVALID_CONTEXT = 201
CAPTURE_ACTIVE = 1
"""Value of CU_STREAM_CAPTURE_STATUS_ACTIVE and of hipStreamCaptureStatusActive."""


class _Value(ctypes.Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("cluster", c_uint * 3), ("flag", c_int)]


class Attribute(ctypes.Structure):
    """The C struct CUlaunchAttribute."""

    _fields_ = [("id", c_int), ("pad", ctypes.c_char * 4), ("value", _Value)]


class Config(ctypes.Structure):
    """The C struct CUlaunchConfig."""

    _fields_: ClassVar = [
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared_bytes", c_uint), ("stream", c_void_p),
        ("attributes", POINTER(Attribute)), ("attribute_count", c_uint),
    ]  # fmt: skip


FUNCTIONS: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [c_void_p],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuStreamGetCaptureInfo_v2": [c_void_p, POINTER(c_int), POINTER(c_uint64), c_void_p, c_void_p, c_void_p],
    "cuTensorMapEncodeTiled": [
        c_void_p, c_int, c_uint32, c_void_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint32), POINTER(c_uint32),
        c_int, c_int, c_int, c_int,
    ],
    "cuLaunchKernelEx": [c_void_p, c_void_p, c_void_p, c_void_p],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}  # fmt: skip
"""Driver functions in use, with the types of their arguments. All return a CUresult, 0 for success."""


class Library(ABC):
    """Functions of a driver's library, which ``call`` provides by name. Raise UnavailableError if one is missing."""

    title: ClassVar[str]
    functions: ClassVar[dict[str, list[Any]]]
    lacking: ClassVar[str]
    """Error for a library without the function ``{}``."""
    capture_function: ClassVar[str]

    def __init__(self, library: Any) -> None:
        for name, types in self.functions.items():
            function = getattr(library, name, None)
            if function is None:
                raise UnavailableError(self.lacking.format(name))
            function.argtypes, function.restype = types, c_int
        self.call = library

    @abstractmethod
    def message(self, status: int) -> str:
        """Return the text of an error."""

    def capture(self, stream: int) -> int:
        """Return the number of the capture that a stream is in; 0 for none."""
        state, number = c_int(), c_uint64()
        capture_info = getattr(self.call, self.capture_function)
        status = capture_info(stream, ctypes.byref(state), ctypes.byref(number), None, None, None)
        return number.value if status == 0 and state.value == CAPTURE_ACTIVE else 0

    def _require(self, status: int) -> None:
        if status:
            raise (DamagedError if status in DAMAGED else UnavailableError)(f"{self.title}: {self.message(status)}")


class LoadedKernel:
    """A kernel of a cubin that is loaded in the primary context of one device."""

    def __init__(self, driver: "Driver", function: int, device: int, context: int) -> None:
        self.driver, self.function, self.device, self.context = driver, function, device, context
        self._shared_bytes = 0
        self._lock = threading.Lock()

    def require(self, shared_bytes: int) -> int:
        """Raise the limit of dynamic shared memory for launches to at least ``shared_bytes``. Return a status."""
        with self._lock:
            if shared_bytes <= self._shared_bytes:
                return 0
            with self.driver.current(self.context):
                status = int(self.driver.call.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes))
            self._shared_bytes = self._shared_bytes if status else shared_bytes
            return status


class Driver(Library):
    """The CUDA driver."""

    title, functions = "the CUDA driver", FUNCTIONS
    lacking = "libcuda: got a driver without {}, expected CUDA 12.3 or newer; update the driver"
    capture_function = "cuStreamGetCaptureInfo_v2"

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self._contexts: dict[int, int] = {}

    @property
    def capture_info(self) -> int:
        return self.address(self.capture_function)

    def message(self, status: int) -> str:
        text = c_char_p()
        known = self.call.cuGetErrorString(status, ctypes.byref(text)) == 0 and text.value
        return f"CUDA error {status}" + (f": {text.value.decode()}" if known and text.value else "")

    def context(self, device: int) -> int:
        """Return the primary context of a device, retained for ever. Raise UnavailableError if the driver refuses it."""
        if device not in self._contexts:
            number, context = c_int(), c_void_p()
            self._require(self.call.cuInit(0))
            self._require(self.call.cuDeviceGet(ctypes.byref(number), device))
            self._require(self.call.cuDevicePrimaryCtxRetain(ctypes.byref(context), number.value))
            self._contexts[device] = context.value or 0
        return self._contexts[device]

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make the context current to this thread. Raise UnavailableError if the driver refuses it."""
        before = c_void_p()
        self._require(self.call.cuCtxPushCurrent_v2(context))
        try:
            yield
        finally:
            self.call.cuCtxPopCurrent_v2(ctypes.byref(before))

    def load(self, cubin: bytes, kernel: str, device: int) -> LoadedKernel:
        """Load the cubin on the device and return its kernel of that name. Raise DamagedError if the driver refuses it."""
        context, module, function = self.context(device), c_void_p(), c_void_p()
        with self.current(context):
            self._require(self.call.cuModuleLoadData(ctypes.byref(module), cubin))
            self._require(self.call.cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()))
        return LoadedKernel(self, function.value or 0, device, context)

    def address(self, name: str) -> int:
        """Return the address of one of ``FUNCTIONS``."""
        return ctypes.cast(getattr(self.call, name), c_void_p).value or 0

    def encode(self, one: TensorMap, address: int, at: int) -> int:
        """Write the CUtensorMap of data at ``address`` to the memory at ``at``, a multiple of 64. Return a status."""
        rank = len(one.sizes)
        sizes, pitches = (c_uint64 * rank)(*one.sizes), (c_uint64 * (rank - 1))(*one.pitches)
        box, ones = (c_uint32 * rank)(*one.box), (c_uint32 * rank)(*([1] * rank))
        return int(
            self.call.cuTensorMapEncodeTiled(
                at, one.data_type, rank, address, sizes, pitches, box, ones, 0, int(one.swizzle), one.promotion, 0
            )
        )


@functools.cache
def find_driver() -> Driver:
    """Return the driver of this machine. Raise UnavailableError if there is none or it is too old."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise UnavailableError(f"the CUDA driver cannot be loaded: {error}") from error
