"""Wheels of models: installed by pip, imported where there is nothing but NumPy, with the bits of tcomp."""

from __future__ import annotations

import base64
import csv
import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tcomp.errors import InputError, TargetError
from tcomp.runtime import read_artifact
from tcomp.shipping.wheel import write_wheel
from tests.shipping import isolation


def installed(wheel: Path, folder: Path) -> Path:
    """By unpacking it, which is all that installing it means (but for the script)."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_pip_installs_it(modules, tmp_path: Path) -> None:
    pytest.importorskip("pip", reason="pip is not installed in this environment")
    module, inputs = modules["residual"]
    (wheel,) = write_wheel(module.artifact, tmp_path / "made", "small_net", "1.2")
    assert wheel.name == f"small_net-1.2-py3-none-manylinux_2_17_{module.manifest.triple.partition('-')[0]}.whl"
    target = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    done = subprocess.run([*command, "--target", str(target), str(wheel)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    x = inputs["in put/0"]
    np.save(tmp_path / "x.npy", x)
    text = (
        "import small_net, importlib.metadata as m, numpy as np\n"
        "print(small_net.run(np.load(sys.argv[1])).tobytes().hex(), 'tcomp' in sys.modules)\n"
        "print(m.version('small_net'), m.requires('small_net'), [e.value for e in m.entry_points(group='console_scripts')])\n"
    )
    said = isolation.run(text, target, isolation.numpy_alone(tmp_path), arguments=(tmp_path / "x.npy",))
    assert said.splitlines()[0] == f"{module(x).tobytes().hex()} False"
    assert said.splitlines()[1] == "1.2 ['numpy>=1.26'] ['small_net.__main__:main']"
    assert (target / "bin/small_net").exists()


def test_its_record_is_right_and_it_is_the_same_every_time(modules, tmp_path: Path) -> None:
    artifact = modules["lookup"][0].artifact
    (one,), (other,) = (write_wheel(artifact, tmp_path / name, "lookup") for name in "ab")
    assert one.read_bytes() == other.read_bytes()
    assert one.stat().st_size - artifact.weights.nbytes < 1 << 20
    with zipfile.ZipFile(one) as archive:
        assert archive.testzip() is None
        rows = list(csv.reader(archive.read("lookup-1.0.dist-info/RECORD").decode().splitlines()))
        assert [path for path, _, _ in rows] == archive.namelist()
        for path, digest, size in rows[:-1]:
            content = archive.read(path)
            hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={hashed}", len(content))
            if path.endswith(".py"):
                compile(content, path, "exec")


def test_weights_beside_it(modules, tmp_path: Path) -> None:
    module, inputs = modules["convolutional"]
    wheel, weights = write_wheel(module.artifact, tmp_path / "made", "net", weights="beside")
    modules["lookup"][0].save(tmp_path / "other.tcomp")
    assert weights.name == "net.tcomp" and wheel.stat().st_size < 1 << 20
    np.save(tmp_path / "x.npy", inputs["x"])
    paths = installed(wheel, tmp_path / "site"), isolation.numpy_alone(tmp_path)
    text = (
        "import net, os, numpy as np\n"
        "from net._runtime.errors import ArtifactError, InputError\n"
        "x = np.load(sys.argv[1])\n"
        "try: net.run(x)\n"
        "except InputError as e: print(e)\n"
        "try: net.load(sys.argv[3])\n"
        "except ArtifactError as e: print(e)\n"
        "os.environ['NET_MODEL'] = sys.argv[2]\n"
        "print(net.run(x).tobytes().hex(), net.load(sys.argv[2], threads=1).threads, net.model().threads)\n"
    )
    said = isolation.run(text, *paths, arguments=(tmp_path / "x.npy", weights, tmp_path / "other.tcomp"))
    assert "the weights of net are not in its wheel" in said and "this is not the model of the wheel" in said
    assert said.splitlines()[-1] == f"{module(inputs['x']).tobytes().hex()} 1 1"


def test_it_runs_files_and_has_several_outputs(modules, tmp_path: Path) -> None:
    module, inputs = modules["detector"]
    (wheel,) = write_wheel(module.artifact, tmp_path / "made", "detector")
    paths = installed(wheel, tmp_path / "site"), isolation.numpy_alone(tmp_path)
    np.savez(tmp_path / "in.npz", **inputs)
    text = "from detector.__main__ import main; sys.exit(main())"
    said = isolation.run(text, *paths, arguments=(tmp_path / "in.npz", "--save", tmp_path / "out.npz", "--threads", 1))
    assert "kept: int64" in said and "chosen: float32" in said and "wrote" in said
    with np.load(tmp_path / "out.npz") as saved:
        for name, array in module.run(inputs).items():
            np.testing.assert_array_equal(saved[name], array)
    assert "the model takes boxes" in isolation.run(text, *paths, status=2)
    several = "import detector, numpy as np; f = np.load(sys.argv[1]); print(type(detector.run(f['boxes'], f['logits'])).__name__)"
    assert isolation.run(several, *paths, arguments=(tmp_path / "in.npz",)).strip() == "tuple"


def test_two_models_in_one_program(modules, tmp_path: Path) -> None:
    """Each has a runtime of its own."""
    for name in ("residual", "lookup"):
        installed(write_wheel(modules[name][0].artifact, tmp_path / f"{name}-made", name)[0], tmp_path / "site")
    text = (
        "import lookup, residual, numpy as np\n"
        "print(lookup.run(np.array([1, 6, 0])).shape, residual.run(np.ones((1, 3, 16, 16), np.float32)).shape)\n"
        "print(lookup._runtime.Module is residual._runtime.Module)\n"
    )
    assert isolation.run(text, tmp_path / "site", isolation.numpy_alone(tmp_path)).splitlines() == ["(3, 2) (1, 10)", "False"]


def test_names_of_the_model_stay_text(modules, tmp_path: Path) -> None:
    """A name in a model is anyone's; it must not become code or metadata."""
    modules["lookup"][0].save(tmp_path / "net.tcomp")
    artifact = read_artifact(tmp_path / "net.tcomp")
    hostile = replace(artifact.manifest.inputs[0], name='x"""\nimport os; os.abort()\nRequires-Dist: evil\n\\')
    artifact.manifest = replace(artifact.manifest, inputs=(hostile,), producer="p\nRequires-Dist: evil")
    (wheel,) = write_wheel(artifact, tmp_path / "made", "net")
    with zipfile.ZipFile(wheel) as archive:
        assert "\nRequires-Dist: evil" not in archive.read("net-1.0.dist-info/METADATA").decode()
        names = compile(archive.read("net/__init__.py"), "net", "exec").co_names
    assert "abort" not in names and "load" in names


def test_what_cannot_be_a_wheel(modules, tmp_path: Path) -> None:
    modules["lookup"][0].save(tmp_path / "net.tcomp")
    artifact = read_artifact(tmp_path / "net.tcomp")
    for name in ("numpy", "tcomp"):
        with pytest.raises(InputError, match="that of a package"):
            write_wheel(artifact, tmp_path / "x", name)
    with pytest.raises(InputError, match="not a version"):
        write_wheel(artifact, tmp_path / "x", "net", "1-a")
    for triple in ("cuda", "riscv64-unknown-linux-gnu", "x86_64-pc-windows-msvc"):
        artifact.manifest = replace(artifact.manifest, triple=triple)
        with pytest.raises(TargetError, match=f"it is for {triple}"):
            write_wheel(artifact, tmp_path / "x", "net")
    assert not (tmp_path / "x").exists()
