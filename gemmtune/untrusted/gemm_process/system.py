"""Settings of a process that the system keeps: who may look into it, its limits, its timers."""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import functools
import os
import platform
import re
import resource
from collections.abc import Callable, Mapping

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

RETURNED = {
    "visible to other processes": 3, "filter of system calls": 21, "timer slack in ns": 30, "no new privileges": 39,
    "no huge pages": 42,
}  # fmt: skip
"""Settings that ``prctl`` returns, with the numbers of the questions in Linux's prctl.h."""
STORED = {"signal at the end of its parent": 2, "time-stamp counter": 25, "adopts orphans": 37}
"""Settings that ``prctl`` stores behind a pointer."""
OF_LIBRARIES = {
    re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*$"): (
        "omp_get_max_threads", "omp_get_max_active_levels", "omp_get_dynamic", "omp_get_thread_limit", "omp_get_proc_bind",
    ),
    re.compile(r"/libtorch_cpu\.so$"): ("MKL_Get_Max_Threads",),
    re.compile(r"/lib(scipy_)?openblas[^/]*$"): tuple(
        f"{scipy}openblas_get_num_threads{width}" for scipy in ("scipy_", "") for width in ("64_", "")
    ),
}  # fmt: skip
"""Libraries that run the threads of torch and numpy, and their functions that say settings."""
PRELOADED = "/etc/ld.so.preload"
"""File with libraries that every program loads before its own."""
MAPPED_BYTES, BLOCKS, IS_MAPPED = 2**23, 32, 2
"""Bytes that malloc maps the first time only, blocks that are more than was freed, and its flag in front of what is mapped."""
OF_STATUS = {"mask of new files": (rb"Umask", 8, 0o777), "locked KiB, in steps of 128 MiB": (rb"VmLck", 10, -(2**17))}
"""Settings in the status of the process: their names there, their base, and their bits that count. Some memory may be locked."""
OF_FILES = {"which process ends first where memory is short": "/proc/self/oom_score_adj"}
"""Settings that the system keeps in files of their own."""
STANDARD = (0, 1, 2)
"""Standard input, output and errors, whose flags other programs share."""
FLOATS_BYTES, CONTROL_BYTES = 64, 2
"""Room for what ``fegetenv`` stores, which is 32 bytes on x86-64, and bytes of it that say how ``long double`` is rounded."""
MAPPED_CODE = re.compile(r"^[0-9a-f]+-\S+ ..x. .* (/.*)$|^Anonymous: +(\d+)|^[0-9a-f]+-\S+ .*$", re.MULTILINE)
"""Files of which code is mapped, and KiB of a mapping that are no longer those of the file."""


def environment(of_python: Mapping[str, str]) -> Callable[[], dict[str, tuple[str | None, str | None]]]:
    """Return a function that says each variable of the environment, as Python has it in ``of_python``, and as C has it."""
    of_c = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    fsdecode = os.fsdecode

    def said() -> dict[str, tuple[str | None, str | None]]:
        known, place = dict[str, str](), 0
        while of_c and (entry := of_c[place]) is not None:
            name, _, value = fsdecode(entry).partition("=")
            known[name], place = value, place + 1
        return {name: (of_python.get(name), known.get(name)) for name in {**of_python, **known}}

    return said


def readers() -> dict[str, Callable[[], object]]:
    """Return functions that say each setting. They take all that they use now."""
    prctl, pointer, integer, limit = ctypes.CDLL(None).prctl, ctypes.byref, ctypes.c_int, resource.getrlimit
    opened, read, close = os.open, os.read, os.close

    def stored(number: int) -> object:
        value = integer(-1)
        prctl(number, pointer(value), 0, 0, 0)
        return value.value

    def of_file(path: str) -> bytes:
        fd = opened(path, os.O_RDONLY)
        try:
            return read(fd, 4096)
        finally:
            close(fd)

    def of_status(search: Callable[[bytes], re.Match[bytes] | None], base: int, bits: int) -> object:
        found = search(of_file("/proc/self/status"))
        return found and oct(int(found[1], base) & bits)

    known: dict[str, Callable[[], object]] = {
        name: functools.partial(of_status, re.compile(rb"^%s:\s*(\w+)" % word, re.MULTILINE).search, base, bits)
        for name, (word, base, bits) in OF_STATUS.items()
    }
    known |= {"flags of standard files": _flags_of_files()}
    known |= {name: functools.partial(of_file, path) for name, path in OF_FILES.items()}
    known |= {"precision of long double": _of_floats()} if platform.machine() == "x86_64" else {}
    known |= {name: functools.partial(prctl, number, 0, 0, 0, 0) for name, number in RETURNED.items()}
    known |= {name: functools.partial(stored, number) for name, number in STORED.items()}
    known |= _of_libraries() | ({"malloc maps memory again": _mapped()} if _has_malloc_of_glibc() else {})
    names = {number: name for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
    return known | {name: functools.partial(limit, number) for number, name in names.items()}


def _flags_of_files() -> Callable[[], object]:
    ask, asked = fcntl.fcntl, (fcntl.F_GETFL, fcntl.F_GETFD)

    def flags(fd: int) -> list[int]:
        try:
            return [ask(fd, question) for question in asked]
        except OSError:
            return []  # closed

    return lambda: [flags(fd) for fd in STANDARD]


def _of_floats() -> Callable[[], object]:
    store, place = ctypes.CDLL("libm.so.6").fegetenv, ctypes.create_string_buffer(FLOATS_BYTES)

    def control() -> str:
        store(place)
        return place.raw[:CONTROL_BYTES].hex()

    return control


class _Place(ctypes.Structure):
    """Place of a function in a library, as dladdr returns it."""

    _fields_ = (("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p))


def _has_malloc_of_glibc() -> bool:
    """Return True if no other allocator is preloaded: sizes before its blocks would say something else."""
    program, place = ctypes.CDLL(None), _Place()
    program.dladdr(ctypes.cast(program.malloc, ctypes.c_void_p), ctypes.byref(place))
    with open("/proc/self/environ", "rb") as variables:
        return is_of_glibc(place.file or b"", variables.read())


def is_of_glibc(file: bytes, variables: bytes) -> bool:
    """Return True if malloc is glibc's where its address is in a file, with these variables at the start of the program.

    An executable at a fixed address, as Debian's Python is, has an entry of its own for what is preloaded, or else for glibc's.
    """
    name, preloads = os.path.basename(file), b"\0LD_PRELOAD=" in b"\0" + variables
    return name.startswith(b"libc.so") or not (b".so" in name or preloads or os.path.exists(PRELOADED))


def _mapped() -> Callable[[], bool]:
    """Return a function that is true if malloc maps new memory of a freed size: each result of torch then costs page faults."""
    libc, size_at, word, blocks = ctypes.CDLL(None), ctypes.c_size_t.from_address, ctypes.sizeof(ctypes.c_size_t), range(BLOCKS)
    allocate, release, size, flag = libc.malloc, libc.free, MAPPED_BYTES, IS_MAPPED
    allocate.restype, release.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def mapped() -> bool:
        release(allocate(size))
        places = [place for place in [allocate(size) for _ in blocks] if place]
        found = [size_at(place - word).value & flag for place in places]
        for place in places:
            release(place)
        return any(found)

    return mapped


def _of_libraries() -> dict[str, Callable[[], object]]:
    """Return functions that say the settings of the loaded libraries that run the threads of torch."""
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    paths = sorted({(line.split()[-1], names) for pattern, names in OF_LIBRARIES.items() for line in lines if pattern.search(line)})
    libraries = [(os.path.basename(path), ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW), names) for path, names in paths]
    return {f"{name} of {path}": getattr(x, name) for path, x, names in libraries for name in names if hasattr(x, name)}


def rewritten() -> Callable[[], list[str]]:
    """Return a function that says of which files the code in memory is another one than in the file."""
    smaps, opened, basename = MAPPED_CODE.finditer, open, os.path.basename

    def found() -> list[str]:
        with opened("/proc/self/smaps") as file:
            text = file.read()
        path, others = "", set[str]()
        for line in smaps(text):
            if line[2] is None:
                path = line[1] or ""
            elif path and not path.startswith(("/memfd:", "/dev/")) and int(line[2]):
                others.add(f"code of {basename(path)}")
        return sorted(others)

    return found
