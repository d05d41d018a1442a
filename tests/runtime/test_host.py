"""What the runtime finds out about the machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from tcomp.errors import ArtifactError
from tcomp.machines import ALL_FEATURES
from tcomp.runtime import host
from tcomp.target import CpuTarget

TRIPLE = f"{platform.machine()}-unknown-linux-gnu"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        # The tightest group on the way up counts.
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 100000", "sys/fs/cgroup/a/b/cpu.max": "300000 100000"}, 1.0),
        # In a container, the host's path is not visible.
        ({"proc/self/cgroup": "0::/docker/123\n", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            {"proc/self/cgroup": "1:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "garbage"}, None),
    ],
)
def test_cpu_quota(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    assert host.cpu_quota(write(tmp_path, files)) == quota


def test_default_threads_obey_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, quota, expected in (({0}, None, 1), ({0, 1, 2, 3}, None, 4), ({0, 1, 2, 3}, 1.5, 2), ({0, 1}, 8.0, 2), ({0}, 0.1, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cpus=cpus: cpus)
        monkeypatch.setattr(host, "cpu_quota", lambda quota=quota: quota)
        monkeypatch.setattr(host, "physical_cores", lambda cpus=cpus: len(cpus))
        host.default_threads.cache_clear()
        assert host.default_threads() == expected
    monkeypatch.undo()
    host.default_threads.cache_clear()
    assert 1 <= host.default_threads() <= len(os.sched_getaffinity(0))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="uses the names of x86 features")
def test_feature_names_of_llvm_and_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["fpu", "pni", "bmi1", "ssse3", "sse4_1", "sse4_2", "avx512f", "avx512_vnni", "amx_int8", "abm", "pclmulqdq", "sha_ni"]
    monkeypatch.setattr(host, "_cpu_flags", lambda: frozenset(map(host._plain, flags)))
    monkeypatch.setattr(host, "tiles_permitted", lambda: True)
    host.check_target(TRIPLE, ("x87", "sse3", "bmi", "sse4.1", "+avx512f", "avx512vnni", "amx-int8", "lzcnt", "pclmul", "sha", "crc32"))
    with pytest.raises(ArtifactError, match=r": avx512bf16, fma\n(.|\n)*compile the model") as caught:
        host.check_target(TRIPLE, ("sse3", "avx512bf16", "fma"))
    assert "sse3" not in str(caught.value)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 alone has such registers")
def test_tile_registers_that_the_system_denies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_cpu_flags", lambda: frozenset({"amxtile", "amxint8", "avx512f"}))
    monkeypatch.setattr(host, "tiles_permitted", lambda: False)
    host.check_target(TRIPLE, ("avx512f",))
    with pytest.raises(ArtifactError, match=r"uses amx-int8, amx-tile\n(.|\n)*does not let this process(.|\n)*-mattr=-amx-int8"):
        host.check_target(TRIPLE, ("amx-int8", "amx-tile", "avx512f"))
    monkeypatch.setattr("tcomp.target._processor", lambda: ("emeraldrapids", sorted(ALL_FEATURES["x86_64"])))
    monkeypatch.setattr("tcomp.target.tiles_permitted", lambda: False)
    target = CpuTarget.host.__wrapped__()
    assert target.has("avx512vnni") and not any(f.startswith("amx") for f in target.features)


def test_this_machine_has_features() -> None:
    assert len(host._cpu_flags()) > 3
    host.check_target(TRIPLE, ())


def test_a_processor_whose_topology_cannot_be_read_is_a_core(tmp_path: Path) -> None:
    (tmp_path / "cpu0/topology/thread_siblings_list").mkdir(parents=True)  # an OSError to read
    write(tmp_path, {f"cpu{n}/topology/thread_siblings_list": "1,3\n" for n in (1, 3)})
    assert [host.core_of(n, tmp_path) for n in range(4)] == ["0", "1,3", "2", "1,3"]
