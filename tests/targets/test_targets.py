"""A few cases on each platform whose programs run here; `python -m tests.targets PLATFORM` runs 200."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest

import tcomp
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.shipping.c_package import write_c_package
from tests.shipping import conftest as models
from tests.targets.platforms import PLATFORMS


@pytest.mark.parametrize("platform", PLATFORMS)
def test_models_compute_what_native_code_does(platform: str, tmp_path: Path) -> None:
    """Convolutions, pooling and a product; and an index that only a run finds."""
    if missing := PLATFORMS[platform].missing:
        pytest.skip(f"not installed: {missing}")
    x = np.random.default_rng(0).standard_normal((1, 3, 16, 16), np.float32)
    for name, model, inputs in (("residual", models.residual(), {"in put/0": x}), ("detector", models.detector(), models.boxes())):
        artifact = compile_model(model, CompileOptions(target=PLATFORMS[platform].target))[0]
        (tmp_path / name).mkdir()
        found, expected = PLATFORMS[platform].run(artifact, inputs, tmp_path / name), tcomp.compile(model).run(inputs)
        for output, values in expected.items():
            np.testing.assert_allclose(found[output].reshape(values.shape), values, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="not installed: ziglang")
def test_a_library_for_macos_is_what_its_loader_wants(tmp_path: Path) -> None:
    """Nothing here runs it: its name, least system, signature, what it needs and what it exports are read (mach-o/loader.h)."""
    artifact = compile_model(models.residual(), CompileOptions(target="arm64-macos"))[0]
    write_c_package(artifact, tmp_path / "net", "net")
    content = (tmp_path / "net/lib/libnet.dylib").read_bytes()
    magic, processor, _, kind, count = struct.unpack_from("<5I", content)
    assert (magic, processor, kind) == (0xFEEDFACF, 0x0100000C, 6)  # 64 bits; arm64; a dynamic library
    commands, at = dict[int, list[bytes]](), 32
    for _ in range(count):
        command, size = struct.unpack_from("<2I", content, at)
        commands.setdefault(command, []).append(content[at : at + size])
        at += size

    def named(command: int) -> list[bytes]:
        return [text[struct.unpack_from("<I", text, 8)[0] :].rstrip(b"\0") for text in commands[command]]

    assert named(0x0D) == [b"@rpath/libnet.dylib"] and named(0x0C) == [b"/usr/lib/libSystem.B.dylib"]
    platform, least = struct.unpack_from("<2I", commands[0x32][0], 8)
    assert (platform, least) == (1, 11 << 16) and 0x1D in commands  # macOS 11.0; signed, which Apple silicon asks of all code
    table, symbols, strings, _ = struct.unpack_from("<4I", commands[0x02][0], 8)
    entries = [struct.unpack_from("<IBBHQ", content, table + 16 * n) for n in range(symbols)]
    names = {content[strings + e[0] : content.index(0, strings + e[0])] for e in entries if e[1] & 0x1F == 0x0F}  # defined, external
    assert {name for name in names if name.startswith(b"_net_")} == {b"_net_run", b"_net_stop", b"_net_message", b"_net_free"}
    undefined = {content[strings + e[0] : content.index(0, strings + e[0])] for e in entries if e[1] & 0x1F == 0x01}
    assert undefined <= {b"_aligned_alloc", b"_free", b"dyld_stub_binder", b"___bzero", b"_memcpy", b"_memset", b"_memmove"}
