"""Mistakes of users: one clear message, no traceback, nothing left behind."""

import os
from importlib.util import find_spec

import numpy as np
import pytest

from tcomp import pipeline


@pytest.fixture
def place(models, artifact, tmp_path):
    """A folder with files of all kinds; the names are those of the table below."""
    content = artifact.read_bytes()
    (tmp_path / "text.onnx").write_text("this is a text\n")
    (tmp_path / "empty.onnx").write_bytes(b"")
    (tmp_path / "empty.json").write_bytes(b"")
    (tmp_path / "trace.json").write_text('{"version": 1, "steps": []}')
    (tmp_path / "short.tcomp").write_bytes(content[:200])
    (tmp_path / "damaged.tcomp").write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    np.save(tmp_path / "double.npy", np.zeros((2, 8)))
    np.save(tmp_path / "wide.npy", np.zeros((2, 9), np.float32))
    np.save(tmp_path / "flat.npy", np.zeros(8, np.float32))
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "two.npz", x=np.zeros((2, 8), np.float32), z=np.zeros(1))
    return tmp_path


MISTAKES = [
    # the command; what its message must say
    ("compile mpl.onnx", "there is no file mpl.onnx"),
    ("compile text.onx", "did you mean text.onnx?"),
    ("compile nowhere/mlp.onnx", "the folder nowhere does not exist"),
    ("compile folder", "folder is a directory"),
    ("compile text.onnx", "not an ONNX model"),
    ("compile empty.onnx", "empty.onnx is empty"),
    ("compile {artifact}", "is a compiled artifact"),
    ("compile {missing}", "nz (Frobnicate, opset 17)"),
    ("compile {mlp} --dim batch", "--dim batch=1 or --dim seq=1..512"),
    ("compile {mlp} --dim batch=two", "`two` is not a size"),
    ("compile {mlp} --dim batch=9..3", "the range 9..3 is empty"),
    ("compile {mlp} --dim batch=1 --dim batch=2", "given twice"),
    ("compile {mlp} --dim bach=1", "no dim `bach`"),
    ("compile {mlp} --shape x", "input=1x3x224x224"),
    ("compile {mlp} --shape x=1x-8", "not a shape"),
    ("compile {mlp} --shape x=1x8x8", "has 2 dimensions"),
    ("compile {mlp} --shape image=1x8", "no input `image`"),
    ("compile {mlp} -o folder", "cannot write folder"),
    ("compile {mlp} -o pipe", "cannot write pipe"),
    ("compile {mlp} -o nowhere/m.tcomp", "mkdir -p nowhere"),
    ("compile {mlp} -o {mlp}", "is the model itself"),
    ("compile {mlp} --emit graph --emit-to nowhere", "the folder nowhere does not exist"),
    ("compile {mlp} --emit graph,cuda", "there is no stage cuda for cpu"),
    ("compile {mlp} --emit-to -", "nothing is emitted"),
    ("compile {mlp} --target tpu", "unknown target `tpu`"),
    ("compile {mlp} --target cpu:-mcpu=z80", "z80"),
    ("compile {mlp} --arch sm_80", "add --target cuda"),
    ("compile {mlp} --target cuda --arch sm_79", "unknown GPU architecture `sm_79`"),
    ("compile {mlp} --target cuda:-arch=sm_80 --arch sm_90", "-arch is given twice"),
    ("compile {mlp} --target cuda:-precision=tf32 --precision fp16", "-precision is given twice"),
    *((f"{command} {{mlp}} --precision tf32", "add --target cuda") for command in ("compile", "run", "bench", "verify", "explain", "tune")),
    *(
        (f"{command} {{mlp}} --target cuda --precision fp8", "one of fp32, tf32")
        for command in ("compile", "run", "bench", "verify", "explain")
    ),
    ("compile {mlp} --target cuda --arch sm_75 --precision bf16", "GPUs before sm_80"),
    ("tune {mlp} --target cuda --arch sm_75", "GPU" if find_spec("cuda") else "pip install 'tcomp[cuda]'"),
    ("tune --resume --arch sm_75", "--arch comes with a model"),
    ("run {artifact} --precision tf32", "--precision has no effect on a compiled model"),
    ("verify {artifact} --proofs --precision tf32", "--precision comes too late"),
    ("run {artifact} --input z=1", "no input `z`"),
    ("run {artifact} --input x", "not of the form NAME=FILE"),
    ("run {artifact} --input x=gone.npy", "there is no file gone.npy"),
    ("run {artifact} --input x=text.onnx", "not a .npy or .npz file"),
    ("run {artifact} --input x=objects.npy", "never loaded"),
    ("run {artifact} --input x=double.npy", "is float64, the model takes float32"),
    ("run {artifact} --input x=wide.npy", "9 instead of 8"),
    ("run {artifact} --input x=flat.npy", "1 dimensions instead of 2"),
    ("run {artifact} --input x=two.npz", "holds several arrays"),
    ("run {artifact} --input two.npz", "no input `z`"),
    ("run {artifact} --input x=1 --input x=2", "given twice"),
    ("run {artifact} --dim batch=65", "its range is 1..64"),
    ("run {artifact} --dim batch=1..2", "given several sizes"),
    ("run {artifact} --dim seq=1", "no symbolic dim `seq`"),
    ("run {artifact} --shape x=1x8", "--shape has no effect"),
    ("run {artifact} --save nowhere/out.npz", "mkdir -p nowhere"),
    ("run {gather} --input ids=1.5", "not a value of input `ids`"),
    ("run {gather} --dim seq=999999999999999", "cannot be meant"),
    ("run short.tcomp", "truncated"),
    ("run damaged.tcomp", "damaged"),
    ("bench {mlp} --against tvm", "unknown choice `tvm`"),
    ("bench {artifact} --against onnxruntime", "cannot run a compiled artifact"),
    ("bench {mlp} --threads 0", "not a list of thread counts"),
    ("check text.onnx", "not an ONNX model"),
    ("verify {artifact}", "is a compiled artifact"),
    ("verify {artifact} --proofs --full", "--proofs runs nothing"),
    ("verify {artifact} --proofs --dim batch=1", "has been compiled: --dim comes too late"),
    ("verify text.onnx --proofs", "not an ONNX model"),
    ("verify gone.json --proofs", "there is no file"),
    ("verify trace.json --proofs", "does not say which kernel it starts from"),
    ("verify empty.json --proofs", "this is not a trace"),
    ("explain gone.onnx", "there is no file"),
    ("demo --model resnet500", "unknown choice `resnet500`"),
]


@pytest.mark.parametrize(("command", "says"), MISTAKES, ids=[c for c, _ in MISTAKES])
def test_message(tcomp, models, artifact, place, command, says):
    names = {"artifact": artifact, **{n: models[n] for n in ("mlp", "missing", "gather")}}
    before = sorted(os.listdir(place))
    arguments = [part.format(**names).replace(":-", " -") for part in command.split(" ")]
    done = tcomp(*arguments, status=2)
    text = " ".join(done.stderr.split())
    assert done.stderr.startswith("error: ") and says in text, text
    assert "Traceback" not in text and done.stdout == ""
    assert sorted(os.listdir(place)) == before
    record = tcomp.json(*arguments, status=2)["error"]
    assert record["what"] in done.stderr.replace("\n", " ") or record["what"] in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compile"], "Missing argument"),
        (["compil", "m.onnx"], "No such command"),
        (["run", "m.tcomp", "--theads", "2"], "No such option"),
        (["run", "m.tcomp", "--threads", "0"], "--threads"),
        (["run", "m.tcomp", "--threads", "two"], "--threads"),
    ],
)
def test_usage(tcomp, arguments, says):
    done = tcomp(*arguments, status=2)
    assert says in " ".join(done.stderr.replace("│", " ").split())


def test_damage_that_only_weights_suffer_is_found_on_verification(artifact, tmp_path):
    from tcomp.errors import ArtifactError
    from tcomp.runtime import load

    content = bytearray(artifact.read_bytes())
    content[-1] ^= 1
    path = tmp_path / "weights.tcomp"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged"):
        load(path, verify=True)


def test_debug_shows_the_traceback(tcomp):
    done = tcomp("compile", "gone.onnx", "--debug", status=2)
    assert "Traceback" in done.stderr and done.stderr.rstrip().splitlines()[-1].startswith("error: there is no file")


def test_a_bug_is_one_line(tcomp, models, monkeypatch):
    def broken(*arguments, **options):
        raise ZeroDivisionError("tile of\nsize 0")

    monkeypatch.setattr(pipeline, "compile_graph", broken)
    done = tcomp("compile", models["mlp"], status=70)
    assert done.stderr == "error: internal error: ZeroDivisionError: tile of size 0; run with --debug for the traceback\n"
    assert "ZeroDivisionError" in tcomp("compile", models["mlp"], "--debug", status=70).stderr
    assert tcomp.json("compile", models["mlp"], status=70)["error"]["kind"] == "internal"


def test_interruption(tcomp, models, monkeypatch, tmp_path):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "compile_graph", interrupted)
    done = tcomp("compile", models["mlp"], "--emit", "graph", status=130)
    assert done.stderr == "interrupted\n" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["pwrite", "replace"])
def test_a_full_disk_leaves_nothing_behind(tcomp, models, monkeypatch, tmp_path, call):
    proper = getattr(os, call)

    def full(*arguments):
        if call == "pwrite" or str(arguments[1]).endswith("mlp.tcomp"):
            raise OSError(28, "No space left on device")
        proper(*arguments)

    (tmp_path / "mlp.tcomp").write_bytes(b"the old one")
    monkeypatch.setattr(os, call, full)
    done = tcomp("compile", models["mlp"], "--emit", "graph", status=2)
    assert "cannot write mlp.tcomp" in done.stderr and "No space left on device" in done.stderr
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("mlp.tcomp", b"the old one")]
