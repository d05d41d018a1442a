"""The distribution tcomp-runtime: built as pip builds it, and run where there is nothing but NumPy."""

from __future__ import annotations

import io
import tomllib
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import tcomp
from tcomp.errors import InputError
from tcomp.runtime import command
from tcomp.runtime.array_files import load_arrays
from tcomp.shipping.runtime_copy import runtime_files
from tests.shipping import isolation

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="the distribution is built by hatchling, which is not installed")
    with pytest.MonkeyPatch.context() as patch:
        from hatchling import build

        patch.chdir(ROOT / "runtime")
        folder = tmp_path_factory.mktemp("runtime")
        return folder / build.build_wheel(str(folder))


def test_it_needs_numpy_alone_and_is_small(wheel: Path, modules, tmp_path: Path) -> None:
    module, inputs = modules["residual"]
    module.save(tmp_path / "net.tcomp")
    np.savez(tmp_path / "in.npz", x=inputs["in put/0"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        metadata = archive.read("tcomp_runtime-0.1.0.dist-info/METADATA").decode()
    assert [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line] == [
        "Requires-Dist: numpy>=1.26"
    ]
    assert wheel.stat().st_size < 200_000
    text = "import numpy as np, tcomp_runtime as t; y = t.load(sys.argv[1])(np.load(sys.argv[2])['x']); print(y.tobytes().hex(), 'tcomp' in sys.modules)"
    said = isolation.run(
        text, tmp_path / "installed", isolation.numpy_alone(tmp_path), arguments=(tmp_path / "net.tcomp", tmp_path / "in.npz")
    )
    assert said.split() == [module(inputs["in put/0"]).tobytes().hex(), "False"]


def test_both_distributions_have_the_same_version_and_license() -> None:
    project = tomllib.loads((ROOT / "runtime/pyproject.toml").read_text())["project"]
    assert project["version"] == tcomp.__version__ and project["scripts"] == {"tcomp-runtime": "tcomp_runtime.command:main"}
    assert (ROOT / "runtime/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_copy_imports_nothing_of_tcomp() -> None:
    files = runtime_files("some.where")
    runtime = ROOT / "tcomp/runtime"
    assert {str(p.relative_to(runtime)) for p in runtime.rglob("*.py")} < set(files) and "host_steps/model.py" in files
    for name, text in files.items():
        compile(text, name, "exec")
        assert "import tcomp" not in text and "from tcomp" not in text, name
    assert "from some.where.errors import" in files["module.py"] and "from some.where.manifest import" in files["artifact.py"]


def test_the_command_runs_files(modules, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, inputs = modules["recurrent"]
    module.save(tmp_path / "net.tcomp")
    for name, array in inputs.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.savez(tmp_path / "states.npz", h=inputs["h"], c=inputs["c"])
    wanted = module.run(inputs)
    x, h, c, states = (str(tmp_path / name) for name in ("x.npy", "h.npy", "c.npy", "states.npz"))
    for given in ([x, h, c], [states, x], [f"c={c}", x, h], [f"x={x}", f"h={h}", f"c={c}"]):
        assert command.main(["run", str(tmp_path / "net.tcomp"), *given, "--save", str(tmp_path / "out")]) == 0
        saved = np.load(tmp_path / "out.npz")
        for name, array in wanted.items():
            np.testing.assert_array_equal(saved[name], array)
    assert command.main(["run", str(tmp_path / "net.tcomp"), "--save", str(tmp_path / "after"), x, "--threads", "1", h, c]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "after.npz")["y"], wanted["y"])
    with pytest.raises(SystemExit):
        command.main(["run", str(tmp_path / "net.tcomp"), x, h, c, "--no-such"])
    assert "unknown options: --no-such" in capsys.readouterr().err
    command.main(["run", str(tmp_path / "net.tcomp"), x, h, c])
    most = [int(n) for n in np.unravel_index(wanted["y"].argmax(), wanted["y"].shape)]
    assert (
        f"y: float32[5, 1, 2, 4], from {wanted['y'].min():.5g} to {wanted['y'].max():.5g}, the largest at {most}" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["x.npy"], "1 files for the 3 inputs that have no name"), ([], "missing inputs: x, h, c"), (["nothing.npy"], "it does not exist"),
        (["x=x.npy", "x=x.npy"], "`x` is given twice"), (["text.npy"], "not a .npy or .npz file"), (["x=two.npz"], "several arrays"),
        (["two.npz"], "no input `a`"), (["a=x.npy"], "no input `a`"), (["."], "it is a folder"), (["x.npy", "x.npy", "x.npy"], "input 'h' has the wrong shape"),
    ],
)  # fmt: skip
def test_mistakes(given, message, modules, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, inputs = modules["recurrent"]
    module.save("net.tcomp")
    np.save("x.npy", inputs["x"])
    np.savez("two.npz", a=inputs["x"], b=inputs["h"])
    Path("text.npy").write_text("no array")
    assert command.main(["run", "net.tcomp", *given]) == command.REFUSED
    assert message in capsys.readouterr().err


def test_damaged_files_of_arrays_are_refused(tmp_path: Path) -> None:
    """Or give arrays; nothing else happens."""
    for write in (np.save, np.savez, np.savez_compressed):
        content = io.BytesIO()
        write(content, np.arange(40.0))
        good, path = content.getvalue(), tmp_path / "x.npz"
        for place in range(len(good)):
            path.write_bytes(good[:place] + bytes([good[place] ^ 0x29]) + good[place + 1 :])
            with suppress(InputError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_arrays(path)


def test_what_is_no_number_is_summarised() -> None:
    assert command.summary("y", np.array([np.nan, np.nan])) == "y: float64[2]"
    assert command.summary("y\n", np.zeros((0, 2), np.int64)) == "y\n: int64[0, 2]"
    assert command.summary("y", np.array([np.nan, 3, -1])) == "y: float64[3], from -1 to 3, the largest at [1]"
    assert command.summary("y", np.array(2)) == "y: int64[], from 2 to 2, the largest at []"
