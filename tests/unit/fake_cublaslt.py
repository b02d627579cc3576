"""Stands in for ``nvmath.bindings.cublasLt``: the same calls, on CPU memory, with cuBLASLt's column-major meaning."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from types import SimpleNamespace

import numpy as np
import torch

from gemmtune.backends import cublaslt
from gemmtune.backends.cublaslt import algorithm, launch, library
from gemmtune.backends.cublaslt.constants import (
    AlgorithmAttribute,
    DescAttribute,
    Epilogue,
    HeuristicResult,
    LayoutAttribute,
    Operation,
    PreferenceAttribute,
    ScaleMode,
)

POINTER, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
MATMUL = ctypes.CFUNCTYPE(INT, *[POINTER] * 14, SIZE, POINTER)
"""cublasLtMatmul, in whose place a call of the native look-up comes to the fake."""
CHECK = ctypes.CFUNCTYPE(INT, *[POINTER] * 8)
LAYOUT = ("dtype", "rows", "cols", "ld", LayoutAttribute.BATCH_COUNT, LayoutAttribute.STRIDED_BATCH_OFFSET)
"""The words of a layout, which lies in memory as the library's own does, and may be copied."""
PLACES = {2: "rows", 3: "cols", 4: "ld", 6: LayoutAttribute.STRIDED_BATCH_OFFSET}
SET_ATTRIBUTE = ctypes.CFUNCTYPE(INT, POINTER, INT, POINTER, SIZE)
CAPTURE_INFO = ctypes.CFUNCTYPE(INT, POINTER, ctypes.POINTER(INT), *[POINTER] * 4)
NUMPY = {0: np.float32, 1: np.float64, 2: np.float16, 3: np.int8, 10: np.int32, 28: np.uint8, 29: np.uint8}
FLOAT8 = {28: torch.float8_e4m3fn, 29: torch.float8_e5m2}
NAMES = {13: "EXECUTION_FAILED", 15: "NOT_SUPPORTED"}
SCALE = {0: ctypes.c_float, 1: ctypes.c_double, 10: ctypes.c_int32}
OPERATIONS = {Operation.N: lambda x: x, Operation.T: np.transpose}


class cuBLASLtError(Exception):
    def __init__(self, status):
        self.status = status
        super().__init__(f"{NAMES[status]} ({status})")


class Fake:
    """``launches`` and ``preferences`` record what was asked; ``fail`` makes the next matmul fail with that status.

    ``native`` counts the calls by ``functions``; ``captures`` tells whether a graph captures every stream.
    """

    cuBLASLtError = cuBLASLtError

    def __init__(self):
        self._ids = itertools.count(1000)
        self.live = {}
        self.launches = []
        self.preferences = []
        self.heuristic_count = 3
        self.check_fails = None
        self.fail = None
        self.native = 0
        self.captures = 0

    def functions(self):
        """The functions of the library that the native look-up calls, by name; what they raise is a status."""

        def matmul(*given):
            return self._status(lambda: self.matmul(*(0 if x is None else x for x in given)))

        def set_attribute(descriptor, attribute, at, size):
            return self._status(lambda: self._set(descriptor, attribute, at, size))

        def set_size(layout, attribute, at, size):
            return self._status(lambda: self._set_layout(layout, PLACES[attribute], at, size))

        def check(*given):
            return self._status(lambda: self.matmul_algo_check(*given))

        return {
            "cublasLtMatmul": MATMUL(matmul),
            "cublasLtMatmulDescSetAttribute": SET_ATTRIBUTE(set_attribute),
            "cublasLtMatrixLayoutSetAttribute": SET_ATTRIBUTE(set_size),
            "cublasLtMatmulAlgoCheck": CHECK(check),
        }

    def _status(self, call):
        self.native += 1
        try:
            call()
        except cuBLASLtError as error:
            return error.status
        return 0

    def _new(self, **values):
        key = next(self._ids)
        self.live[key] = values
        return key

    def _free(self, key):
        del self.live[key]

    def _set(self, key, attribute, at, size):
        self.live[key][attribute] = int.from_bytes(ctypes.string_at(at, size), "little", signed=True)

    def create(self):
        return 1

    def get_version(self):
        return 130100

    def matmul_desc_create(self, compute, scale):
        return self._new(compute=compute, scale=scale)

    def matrix_layout_create(self, dtype, rows, cols, ld):
        assert ld >= rows
        words = (ctypes.c_uint64 * 8)(dtype, rows, cols, ld, 1, 0, 0, len(self.live))  # the last one is not set by the library
        self.live[ctypes.addressof(words)] = words
        return ctypes.addressof(words)

    def _layout(self, key):
        return dict(zip(LAYOUT, (ctypes.c_uint64 * 8).from_address(key), strict=False))

    def _set_layout(self, key, attribute, at, size):
        value = int.from_bytes(ctypes.string_at(at, size), "little", signed=True)
        (ctypes.c_uint64 * 8).from_address(key)[LAYOUT.index(attribute)] = value

    def matmul_preference_create(self):
        return self._new()

    matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = _free
    matmul_desc_set_attribute = matmul_preference_set_attribute = _set
    matrix_layout_set_attribute = _set_layout

    def matmul_algo_get_heuristic(self, handle, operation, left, right, c, d, preference, count, results_at, returned_at):
        self.preferences.append({PreferenceAttribute(k): v for k, v in self.live[preference].items()})
        if self.heuristic_count == 0:
            raise cuBLASLtError(15)
        found = min(count, self.heuristic_count)
        results = (HeuristicResult * count).from_address(results_at)
        for i in range(found):
            results[i].algorithm[0] = i
            results[i].workspace_bytes = 256 * i
        ctypes.c_int.from_address(returned_at).value = found

    def matmul_algo_check(self, handle, operation, left, right, c, d, algorithm_at, result_at):
        if self.check_fails is not None:
            raise cuBLASLtError(self.check_fails)
        result = HeuristicResult.from_address(result_at)
        result.workspace_bytes = 256 * ctypes.c_uint64.from_address(algorithm_at).value + self._layout(d)["cols"]

    def matmul_algo_config_get_attribute(self, algorithm_at, attribute, at, size, written_at):
        rank = ctypes.c_uint64.from_address(algorithm_at).value
        values = {AlgorithmAttribute.ID: 66, AlgorithmAttribute.TILE: 20 + rank, AlgorithmAttribute.SPLITK: 1 + rank}
        values[AlgorithmAttribute.REDUCTION] = (0, 2, 4)[min(rank, 2)]
        ctypes.memmove(at, values.get(attribute, 0).to_bytes(size, "little"), size)

    def matmul(
        self, handle, operation, alpha_at, left_at, left, right_at, right, beta_at, c_at, c, d_at, d, opaque, scratch, need, stream
    ):
        if self.fail is not None:
            raise cuBLASLtError(self.fail)
        self.launches.append({"handle": handle, "scratch": scratch, "need": need, "stream": stream, "in_place": c_at == d_at})
        asked = self.live[operation]
        scalar = SCALE[asked["scale"]]
        alpha, beta = scalar.from_address(alpha_at).value, scalar.from_address(beta_at).value
        wide = NUMPY[asked["scale"]]
        a, b, old, out = (self._view(x, at) for x, at in ((left, left_at), (right, right_at), (c, c_at), (d, d_at)))
        for i in range(out.shape[0]):
            left_op = OPERATIONS[asked[DescAttribute.TRANSA]](self._numbers(left, a[i])).astype(wide)
            right_op = OPERATIONS[asked[DescAttribute.TRANSB]](self._numbers(right, b[i])).astype(wide)
            if DescAttribute.A_SCALE_POINTER in asked:
                left_op = left_op * self._scales(asked, left_op.shape, "A")
                right_op = right_op * self._scales(asked, right_op.shape[::-1], "B").T
            result = alpha * (left_op @ right_op)
            if beta != 0:
                result = result + beta * old[i].astype(wide)
            if asked.get(DescAttribute.EPILOGUE, Epilogue.DEFAULT) == Epilogue.BIAS:
                result = result + self._bias(asked, self._layout(d), i)[:, None].astype(wide)
            out[i] = result

    def _view(self, key, at):
        x = self._layout(key)
        dtype = np.dtype(NUMPY[x["dtype"]])
        batch, stride = x.get(LayoutAttribute.BATCH_COUNT, 1), x.get(LayoutAttribute.STRIDED_BATCH_OFFSET, 0)
        span = (batch - 1) * stride + (x["cols"] - 1) * x["ld"] + x["rows"]
        flat = np.frombuffer((ctypes.c_char * (span * dtype.itemsize)).from_address(at), dtype=dtype)
        strides = tuple(n * dtype.itemsize for n in (stride, 1, x["ld"]))
        return np.lib.stride_tricks.as_strided(flat, (batch, x["rows"], x["cols"]), strides, writeable=True)

    def _numbers(self, key, values):
        """8-bit floats, which numpy does not know, as float32."""
        dtype = FLOAT8.get(self._layout(key)["dtype"])
        return values if dtype is None else torch.from_numpy(values.copy()).view(dtype).float().numpy()

    def _scales(self, asked, shape, side):
        """The scale of each element of an operand [rows, K], from the layouts of cuBLAS's documentation."""
        rows, k = shape
        mode = asked.get(DescAttribute[f"{side}_SCALE_MODE"], ScaleMode.SCALAR)
        kb, blocks = -(-k // 128), -(-rows // 128)
        count = {ScaleMode.SCALAR: 1, ScaleMode.OUTER_VECTOR: rows, ScaleMode.VECTOR_128: rows * kb}.get(
            mode, -(-kb // 4) * 4 * blocks
        )
        at = asked[DescAttribute[f"{side}_SCALE_POINTER"]]
        flat = np.frombuffer((ctypes.c_char * (4 * count)).from_address(at), dtype=np.float32)
        if mode == ScaleMode.SCALAR:
            return np.broadcast_to(flat, shape)
        if mode == ScaleMode.OUTER_VECTOR:
            return np.broadcast_to(flat[:, None], shape)
        if mode == ScaleMode.VECTOR_128:
            return flat.reshape(kb, rows).T.repeat(128, 1)[:, :k]
        return flat.reshape(blocks, -1).repeat(128, 0)[:rows].repeat(128, 1)[:, :k]

    def _bias(self, asked, d, i):
        dtype = np.dtype(NUMPY[d["dtype"]])
        at = asked[DescAttribute.BIAS_POINTER] + i * asked.get(DescAttribute.BIAS_BATCH_STRIDE, 0) * dtype.itemsize
        return np.frombuffer((ctypes.c_char * (d["rows"] * dtype.itemsize)).from_address(at), dtype=dtype)


def installed(monkeypatch, device, stream):
    """A fake in the place of the bindings, on a GPU that is the CPU's memory; its functions have addresses."""
    fake = Fake()
    for module in (library, algorithm, cublaslt):
        monkeypatch.setattr(module, "bindings", lambda: fake)
    monkeypatch.setattr(cublaslt, "installed_version", lambda: "1.0.0")
    monkeypatch.setattr(cublaslt, "detect", lambda _: device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(fake.captures))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(launch, "_allocate", lambda index, size_bytes: torch.empty(size_bytes, dtype=torch.uint8))
    monkeypatch.setattr(launch, "_blocks", {})
    monkeypatch.setattr(launch, "kept", lambda make, *_: make())
    functions = fake.functions()
    functions["cuStreamGetCaptureInfo_v2"] = CAPTURE_INFO(lambda _, state, *more: state.__setitem__(0, fake.captures) or 0)
    fake.kept = functions

    def address(name):
        return ctypes.cast(functions[name], ctypes.c_void_p).value

    monkeypatch.setattr(launch, "function_address", address)
    monkeypatch.setattr(launch, "find_driver", lambda: SimpleNamespace(capture_info=address("cuStreamGetCaptureInfo_v2")))
    library.handle.cache_clear()
    return fake
