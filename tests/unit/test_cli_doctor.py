"""``gemmtune doctor``."""

from __future__ import annotations

import json
import platform

import pytest
import torch
from namespaces import MS_RDONLY, mounted

from gemmtune import __version__, cli, settings
from gemmtune.backends.table import BACKENDS
from gemmtune.choice import Availability
from gemmtune.device import detect
from gemmtune.selector.machine_limits import LIMITS
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import Store


def doctor(capsys):
    """The report as JSON, and the exit status."""
    status = cli.run(["doctor", "--json", "-"])
    return json.loads(capsys.readouterr().out), status


def test_a_working_machine(capsys, own_store):
    data, status = doctor(capsys)
    assert (status, data["problems"]) == (0, [])
    assert (data["gemmtune"], data["python"]) == (__version__, platform.python_version())
    assert data["packages"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])  # not all builds name their suffix
    cpu = data["devices"][0]
    assert (cpu["torch_device"], cpu["arch"], cpu["threads"]) == ("cpu", detect("cpu").arch, torch.get_num_threads())
    assert list(data["backends"]) == list(BACKENDS)
    assert data["backends"]["aten"]["ok"]
    assert (data["store"]["path"], data["store"]["state"], data["store"]["rows"]) == (str(own_store), "file", 0)
    assert data["settings"]["store_path"] == str(own_store)


def test_a_backend_that_is_not_available_says_why(capsys, own_store):
    data, _ = doctor(capsys)
    for entry in data["backends"].values():
        for seen in entry["devices"]:
            assert seen["detail"]


def test_text_and_json_agree(capsys, own_store):
    assert cli.run(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in (__version__, f"torch {torch.__version__}", detect("cpu").name, str(own_store)):
        assert word in text
    assert "aten on cpu: yes, " in text
    assert "cublaslt on cpu: no, " in text
    assert "measured limits of cpu: none yet; the first tuning measures them" in text
    assert text.endswith("no problems found\n")


def test_an_amd_gpu_is_one_of_rocm(monkeypatch, capsys, own_store):
    monkeypatch.setattr(torch.version, "hip", "6.4.43483")
    data, _ = doctor(capsys)
    assert (data["gpu"]["platform"], data["gpu"]["torch_built_for"]) == ("hip", "6.4.43483")
    assert cli.run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "torch is built for ROCm 6.4.43483; driver " in text
    assert "compiled and inspected, and never run on an AMD GPU" in text


def test_measured_limits_are_shown(capsys, own_store):
    Store.open(own_store).put_limits(fingerprint_text(detect("cpu"), LIMITS), {"bandwidth_gbps": 48.25})
    assert cli.run(["doctor"]) == 0
    assert "measured limits of cpu: bandwidth_gbps 48.2\n" in capsys.readouterr().out


def test_missing_compilers_are_named(capsys, own_store, monkeypatch):
    monkeypatch.setattr("gemmtune.cli.doctor.shutil.which", lambda name: None)
    assert cli.run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "C++: none of c++, g++, clang++ on the PATH" in text
    assert "CUDA: none of nvcc on the PATH" in text
    none = "no C++ compiler on PATH (c++, g++, clang++); install g++ or clang++"
    assert text.splitlines()[-1] == f"note: cpp on cpu: only kernels that were compiled before: {none}"


@pytest.mark.filterwarnings("ignore:store:RuntimeWarning")
def test_a_store_and_cache_folder_that_cannot_be_used_are_problems(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    with settings.patch(cache_dir=str(tmp_path / "file" / "cache"), store_path=None):
        data, status = doctor(capsys)
    assert status == 1
    cache, store = data["problems"]
    assert cache == (
        f"cache_dir: got {tmp_path}/file/cache, expected a writable folder ([Errno 20] Not a directory: '{tmp_path}/file/cache'); "
        "set cache_dir (GEMMTUNE_CACHE_DIR) to a folder of yours on a file system that allows execution"
    )
    assert store.startswith("store: got ")


def test_what_others_can_change_is_a_problem(capsys, tmp_path):
    (tmp_path / "cache" / "cpp").mkdir(parents=True)
    for name in ("one.so", "two.so", "two.lock"):
        (tmp_path / "cache" / "cpp" / name).touch()
        (tmp_path / "cache" / "cpp" / name).chmod(0o666)
    with settings.patch(cache_dir=str(tmp_path / "cache"), store_path=str(tmp_path / "store.sqlite")):
        [problem] = doctor(capsys)[0]["problems"]
        assert problem.startswith("cache_dir: 2 files are not used, expected files that only this user and root can change, got ")
        assert problem.endswith(".so. If you trust them, chown them to this user and chmod go-w")
    (tmp_path / "cache").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    with settings.patch(cache_dir=f"{tmp_path}/link", store_path=None):
        [problem] = doctor(capsys)[0]["problems"]
    assert f"others than its owner can write {tmp_path}/cache (mode 777). If you trust its contents, chmod go-w" in problem


def test_a_read_only_cache_folder_is_no_problem(capsys, tmp_path, own_store):
    (tmp_path / "cache" / "cpp").mkdir(parents=True)

    def work():
        with settings.patch(cache_dir=str(tmp_path / "cache")):
            data, status = doctor(capsys)
            assert (status, data["problems"], data["cache_folder"]["writable"]) == (0, [], False)
            cli.run(["doctor"])
        assert "/cache: 0 files, 0.0 MiB, read-only: what is in it is used\n" in capsys.readouterr().out

    mounted(work, {tmp_path / "cache": MS_RDONLY})


def test_no_working_backend_is_a_problem(capsys, own_store, monkeypatch):
    class Missing:
        """A backend that is never available."""

        def available(self, device):
            return Availability(ok=False, detail="not here; install it")

        def serves_by_default(self, device):
            return False

    monkeypatch.setattr("gemmtune.cli.doctor.load", lambda name: Missing())
    assert cli.run(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "triton on cpu: no, not here; install it (only when named)" in text
    assert "problem: no backend works on any device of this machine" in text


def test_a_backend_whose_module_is_broken_does_not_stop_the_doctor(capsys, own_store, monkeypatch):
    def broken(name):
        raise ImportError("libfoo.so is missing")

    monkeypatch.setattr("gemmtune.cli.doctor.load", broken)
    assert cli.run(["doctor"]) == 1
    assert "triton: no, its module cannot be imported: libfoo.so is missing" in capsys.readouterr().out
