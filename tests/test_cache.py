"""The cache of what was compiled: only what this user wrote is believed; it keeps within its size; nothing that is wrong with it is an error."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tcomp import cache
from tcomp.cli.app import app
from tcomp.errors import InputError

NAME = "ab" + "0" * 62


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that does not exist yet."""
    monkeypatch.setenv("TCOMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache._Written, "bytes", 0)
    cache._danger_above.cache_clear()
    cache._warn.cache_clear()
    yield tmp_path / "cache"
    cache._danger_above.cache_clear()


def stored(folder: Path) -> Path:
    cache.store("kernels", NAME, {"a": 1})
    return folder / "kernels" / "ab" / f"{NAME}.json"


def test_the_folder_is_private(folder: Path) -> None:
    path = stored(folder)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, folder / "kernels", path.parent, path)] == [0o700, 0o700, 0o700, 0o600]
    assert cache.load("kernels", NAME) == {"a": 1} and cache.problem() == ""


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture, mode: int) -> None:
    path = stored(folder)
    folder.chmod(mode)
    assert cache.load("kernels", NAME) is None
    cache.store("kernels", NAME, {"a": 2})
    assert b'{"a": 1}' in path.read_bytes()
    assert [r.message for r in caplog.records] == [f"the cache {folder} is not used: {cache.problem().split(': ', 1)[1]}"]
    assert f"other users may write to {folder}" in caplog.text
    folder.chmod(0o755)  # others may look
    assert cache.load("kernels", NAME) == {"a": 1}


def test_a_folder_of_another_user_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(folder)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert cache.load("kernels", NAME) is None and f"{folder} belongs to user {uid}" in caplog.text


def test_folders_above_are_looked_at(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(folder)
    tmp_path.chmod(0o1777)  # as /tmp: what is in it stays its owner's
    cache._danger_above.cache_clear()
    assert cache.load("kernels", NAME) == {"a": 1}
    tmp_path.chmod(0o777)
    cache._danger_above.cache_clear()
    assert cache.load("kernels", NAME) is None and f"other users may write to {tmp_path}" in caplog.text
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "link").symlink_to(folder)
    monkeypatch.setenv("TCOMP_CACHE", str(tmp_path / "home" / "link"))
    assert cache.load("kernels", NAME) is None
    tmp_path.chmod(0o700)
    cache._danger_above.cache_clear()
    assert cache.load("kernels", NAME) == {"a": 1}


def test_odd_files_are_no_records(tmp_path: Path, folder: Path) -> None:
    path = stored(folder)
    intact = path.read_bytes()
    (tmp_path / "elsewhere").write_bytes(intact)

    def link() -> None:
        path.symlink_to(tmp_path / "elsewhere")

    def writable() -> None:
        path.write_bytes(intact)
        path.chmod(0o622)

    def device() -> None:
        path.symlink_to("/dev/zero")

    for odd in (link, device, writable, lambda: os.mkfifo(path), lambda: path.mkdir(), lambda: path.write_bytes(b"")):
        path.rmdir() if path.is_dir() else path.unlink()
        odd()
        assert cache.load("kernels", NAME) is None, odd
    cache.store("kernels", NAME, {"a": 1})
    assert path.read_bytes() == intact and (tmp_path / "elsewhere").read_bytes() == intact


def test_the_folder_may_be_a_link(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder itself, for example on a larger disk."""
    stored(folder)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("TCOMP_CACHE", str(tmp_path / "link"))
    assert cache.load("kernels", NAME) == {"a": 1}


def test_what_was_used_least_recently_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCOMP_CACHE_SIZE", "100K")
    for n in range(16):
        cache.store("kernels", cache.name(str(n)), "x" * 8000)
        for entry in cache.entries():
            path = folder / entry.path
            os.utime(path, (path.stat().st_mtime - 100,) * 2)
        cache.load("kernels", cache.name("0"))  # again and again
    kept = [n for n in range(16) if cache.load("kernels", cache.name(str(n)))]
    assert sum(e.size for e in cache.entries()) <= 100 << 10 and kept[0] == 0 and kept[-1] == 15
    assert kept[1:] == list(range(17 - len(kept), 16))


def test_others_files_are_left_alone_and_abandoned_ones_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCOMP_CACHE_SIZE", "1")
    path = stored(folder)
    mine, old, new = (
        path.with_name("notes.txt"),
        path.with_name(f".{path.name}.{'0' * 12}.tmp"),
        path.with_name(f".{path.name}.{'1' * 12}.tmp"),
    )
    for made in (mine, old, new):
        made.write_text("x")
    os.utime(old, (1, 1))
    cache.store("kernels", NAME, {"a": 2})
    assert [p.exists() for p in (path, mine, old, new)] == [False, True, False, True]
    assert cache.clean()[0] == 1 and mine.exists() and not new.exists()


@pytest.mark.parametrize("size", ["much", "-1", "1" * 99, "4X"])
def test_what_is_no_size(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: str) -> None:
    monkeypatch.setenv("TCOMP_CACHE_SIZE", size)
    with pytest.raises(InputError, match="TCOMP_CACHE_SIZE"):
        cache.size_limit()
    stored(folder)
    assert cache.load("kernels", NAME) == {"a": 1} and "TCOMP_CACHE_SIZE" in caplog.text
    for text, limit in (("500M", 500 << 20), ("4GiB", 4 << 30), ("17", 17), ("2KB", 2048)):
        monkeypatch.setenv("TCOMP_CACHE_SIZE", text)
        assert cache.size_limit() == limit


def test_a_user_without_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TCOMP_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert cache.folder() is None and "no home" in cache.problem()
    assert cache.recall("kernels", NAME, lambda: 7) == 7 and cache.load("kernels", NAME) is None
    result = CliRunner().invoke(app, ["cache", "show"])
    assert result.exit_code == 2 and "there is no home folder" in result.output


@pytest.mark.parametrize("call", ["mkdir", "open", "rename", "utime", "fstat"])
def test_a_full_or_broken_disk_costs_only_time(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        assert cache.recall("kernels", NAME, lambda: 7) == 7
    assert not [p for p in folder.rglob("*.tmp")]
    assert cache.recall("kernels", NAME, lambda: 7) == 7


def test_a_full_disk_leaves_nothing_behind(folder: Path) -> None:
    """A real one, of the process: files may not grow beyond 4 KiB."""
    program = (
        "import resource, signal; from tcomp import cache; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); cache.store('kernels', 'ab' * 8, 'x' * 100_000)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[1])
    assert [p for p in folder.rglob("*") if p.is_file()] == [] and (folder / "kernels" / "ab").is_dir()


def test_writers_and_readers_at_once(folder: Path) -> None:
    """Each reader sees a whole record or none, while others write the same one, and the size is kept."""
    program = (
        "import sys; from tcomp import cache\n"
        "for n in range(150):\n"
        "    cache.store('kernels', cache.name(str(n % 5)), sys.argv[1] * 3000)\n"
        "    assert (found := cache.load('kernels', cache.name(str(n % 7)))) is None or len(set(found)) == 1 and len(found) == 3000\n"
    )
    environment = {**os.environ, "TCOMP_CACHE_SIZE": "10K"}
    root = Path(__file__).parents[1]
    running = [subprocess.Popen([sys.executable, "-c", program, c], env=environment, cwd=root) for c in "abc"]
    assert [p.wait(120) for p in running] == [0, 0, 0]
    assert not [p for p in folder.rglob("*.tmp")]


def test_commands(folder: Path) -> None:
    missing = CliRunner().invoke(app, ["cache", "show"])
    assert missing.exit_code == 2 and "there is no cache" in missing.output
    path = stored(folder)
    shown = json.loads(CliRunner().invoke(app, ["cache", "show", "--json"]).output)
    size = path.stat().st_size
    assert shown == {
        "folder": str(folder), "bytes": size, "limit": 2 << 30, "files": 1, "kinds": {"kernels": {"files": 1, "bytes": size}},
    }  # fmt: skip
    assert "kernels" in CliRunner().invoke(app, ["cache", "show"]).output
    assert CliRunner().invoke(app, ["cache", "clean"]).output == f"removed 1 file, {size} B\n" and not path.exists()
    folder.chmod(0o777)
    refused = CliRunner().invoke(app, ["cache", "clean"])
    assert refused.exit_code == 2 and "other users may write" in refused.output
