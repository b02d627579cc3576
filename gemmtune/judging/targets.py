"""Targets of the judge: functions of modules and files, folders of them, models of KernelBench's form, C++ and CUDA sources."""

import ast
import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..backends.cpp.compiler import find_compiler, why_no_compiler
from ..declaration.labels import OPS
from ..errors import SubjectError
from ..toolchain import nvcc
from ..toolchain.made_once import compile_text, made_once
from ..untrusted.target import Target, roots_of

SOURCES = (".py", ".cpp", ".cc", ".cu")
CPP_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-w")
CUDA_FLAGS = ("-O3", "-std=c++17", "-arch=native", "-shared", "-Xcompiler", "-fPIC")
COMPILE_S = 300.0
LIBRARY_TRAITS: Mapping[str, Any] = {"ops": ["mm"], "layouts": ["row"], "dtypes": ["float32"]}
"""Declarations of a function of C++ or CUDA, which ``--trait`` changes."""
COMMON = ("matmul", "mm", "gemm", "kernel", "forward", "custom_kernel", "ModelNew")
"""Names of a candidate's function, in this order, if a file has several."""


def targets_of(words: str, device: str) -> list[Target | SubjectError]:
    """Return the targets that a user's words mean: one, or those of a folder, with an error for each file that has no GEMM.

    Raises:
        SubjectError: there is no such file or module, or it has no GEMM.
    """
    if not os.path.isdir(words):
        return [target_of(words, device)]
    if (Path(words) / "__init__.py").exists():
        name = Path(words).resolve().name
        raise SubjectError(f"{words}: got a package, expected {name}:function, judged in the folder that has the package")
    found = [path for path in sorted(Path(words).iterdir()) if path.suffix in SOURCES and not path.name.startswith("_")]
    if not found:
        raise SubjectError(f"{words}: got a folder without candidates, expected files {', '.join(SOURCES)}")
    return [_target_or_error(str(path), device) for path in found]


def _target_or_error(words: str, device: str) -> Target | SubjectError:
    try:
        return target_of(words, device)
    except SubjectError as error:
        return error


def target_of(words: str, device: str = "cpu") -> Target:
    """Return the target of ``pkg.mod:function``, of ``file.py:function`` or ``file.cpp:symbol``, or of a file alone."""
    path, _, name = words.rpartition(":") if Path(words.rpartition(":")[0]).suffix in SOURCES else (words, "", "")
    file = Path(path)
    if file.suffix in SOURCES:
        if not os.path.isfile(file):
            raise SubjectError(f"{words}: got no such file, expected path.py:function, path.cpp:symbol or a folder of them")
        if file.suffix == ".py":
            return _of_python(file.resolve(), name or _named(file), words)
        return _of_source(file.resolve(), name or _symbol(file), words, device)
    module, _, name = words.partition(":")
    return Target(kind="module", path=module, name=name, roots=roots_of(module), words=words)


def _of_python(file: Path, name: str, words: str) -> Target:
    return Target(kind="file", path=str(file), name=name, roots=(str(file),), words=words)


def _named(file: Path) -> str:
    """Return the common name of a file's functions. "" if several are torch's operations, or its process finds the only one."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise SubjectError(f"{file}: got no Python source ({error})") from error
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {x.id for node in tree.body if isinstance(node, ast.Assign) for x in node.targets if isinstance(x, ast.Name)}
    if "ModelNew" in own:
        return "ModelNew"
    if len(own.intersection(OPS)) > 1:
        return ""
    return next((name for name in COMMON if name in own), "")


def _symbol(file: Path) -> str:
    """Return the common name that a source declares with C linkage."""
    text = file.read_text(encoding="utf-8", errors="replace")
    found = next((name for name in COMMON if f" {name}(" in text and 'extern "C"' in text), "")
    if not found:
        raise SubjectError(
            f'{file}: got no symbol, expected {file.name}:name of a function extern "C" void name(const T* a, const T* b, T* out, '
            "int64_t m, int64_t n, int64_t k), with a cudaStream_t after them in a .cu"
        )
    return found


def _of_source(file: Path, name: str, words: str, device: str) -> Target:
    """Return the target of a C++ or CUDA source, which is still to be compiled."""
    kind = "cuda" if file.suffix == ".cu" else "cpu"
    if device.partition(":")[0] != kind:
        raise SubjectError(f"{words}: got device {device}, expected {kind}")
    traits = dict(LIBRARY_TRAITS) | {"devices": [kind]}
    return Target(kind="source", path=str(file), name=name, roots=(str(file),), traits=traits, words=words)


def compiled(target: Target) -> Target:
    """Return the target with its source compiled, once. Nothing of it runs here.

    Raises:
        SubjectError: there is no compiler. CompileError: it does not compile.
    """
    if target.kind != "source":
        return target
    file, words = Path(target.path), target.words
    text = file.read_text(encoding="utf-8", errors="replace")
    found = nvcc.find_compiler() if file.suffix == ".cu" else find_compiler()
    if found is None:
        raise SubjectError(f"{words}: {why_no_compiler()}")
    command = [found.path, *(CUDA_FLAGS if file.suffix == ".cu" else CPP_FLAGS)]
    digest = hashlib.blake2b("\0".join((text, found.version, *command)).encode(), digest_size=16).hexdigest()
    library = made_once(
        ("judged", f"{digest}.so"),
        lambda made: compile_text(command, text, file.suffix, made, words, timeout_s=COMPILE_S),
        words,
    )
    return dataclasses.replace(target, kind="library", path=str(library))
