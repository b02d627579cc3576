"""The extension module: compiled once for a version of torch and Python, and kept in the cache folder."""

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

import torch

from ..backends.cpp.compiler import find_compiler, why_no_compiler
from ..cache import cached, present
from ..errors import UnavailableError
from ..toolchain.made_once import compile_text, made_once, opened
from ..workers.worker import NoWorkerError, Worker

NAME = "gemmtune_native"
SOURCES = ("key.h", "result.h", "memory.h", "launch.h", "driver.h", "library.h", "table.h", "layer.h", "parse.h", "module.cpp")
HERE = Path(__file__).parent
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,--no-as-needed", "-DAT_PER_OPERATOR_HEADERS")
"""With the last one torch's headers declare no operators but those that are asked for, which takes a fifth less time."""
LIBRARIES = ("torch_python", "torch_cpu", "c10")
"""Libraries that torch has already loaded. The linker needs them, so that the loader finds their symbols."""
TIMEOUT_S = 3600.0
"""Time limit of the compilation, which has low priority on a machine that may be busy."""


def torch_folder() -> Path:
    return Path(torch.__file__).parent


def python_include() -> str:
    return sysconfig.get_paths()["include"]


@functools.cache
def source_digest() -> str:
    """Return a hash over the sources and everything that the module is built against."""
    made_of = [
        *((HERE / name).read_text(encoding="utf-8") for name in SOURCES),
        *FLAGS,
        torch.__version__,
        str(torch.version.git_version),
    ]
    made_of += [str(sysconfig.get_config_var("SOABI")), str(torch.compiled_with_cxx11_abi())]
    return hashlib.blake2b("\n".join(made_of).encode(), digest_size=16).hexdigest()


def module_file() -> tuple[str, ...]:
    """Return the module's place in the cache. It omits the compiler: what another machine has compiled runs here too."""
    return "native", f"{source_digest()}.so"


def why_impossible() -> str | None:
    """Return why the module cannot be built here, with a remedy. None if it can."""
    headers = {"torch": torch_folder() / "include/torch/csrc/python_headers.h", "Python": Path(python_include()) / "Python.h"}
    for what, header in headers.items() if (reason := why_no_compiler()) is None else ():
        if not header.exists():
            return f"the headers of {what} are not installed: {header} is missing; install the development files of {what}"
    return reason


def made() -> Path | None:
    path = cached(*module_file())
    return path if present(path) else None


def make(*, quietly: bool = False) -> Path:
    """Return the module's path, compiled with ``quietly`` low priority if missing. Raises CompileError, UnavailableError, or
    an error of ``Worker.call``.
    """
    return made_once(module_file(), functools.partial(_compile, quietly=quietly), NAME)


def _compile(to: Path, *, quietly: bool) -> None:
    reason, compiler = why_impossible(), find_compiler()
    if reason is not None or compiler is None:
        raise UnavailableError(f"the native look-up cannot be built: {reason}")
    libraries = torch_folder() / "lib"
    command = [
        *(("nice", "-n", "19") if quietly else ()), compiler.path, *FLAGS, f"-I{HERE}", f"-I{torch_folder() / 'include'}",
        f"-I{python_include()}", f"-L{libraries}", *(f"-l{name}" for name in LIBRARIES),
    ]  # fmt: skip
    job = command, f'#include "{SOURCES[-1]}"\n', ".cpp", to, NAME
    try:
        worker = Worker(gpu=False)  # ends with this program, and the compiler with it
    except NoWorkerError:
        compile_text(*job)
        return
    with contextlib.closing(worker):
        worker.call(compile_text, *job, timeout_s=TIMEOUT_S)


def load() -> Any:
    """Return the module, compiled if it is missing. The exceptions are those of ``make``, and OSError."""
    return opened(make, _imported)


def _imported(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise OSError(str(error)) from error
    return module
