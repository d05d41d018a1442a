"""Targets by the names of platforms, what is refused, and that code is made for each."""

from __future__ import annotations

import pytest

from tcomp.backends.cpu import CpuBackend
from tcomp.codegen.archive import archive, members
from tcomp.errors import CodegenError, TargetError
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.platforms import PLATFORMS
from tcomp.target import CpuTarget, Target
from tests.shipping import conftest as models

NAMES = {
    "x86_64-unknown-linux-gnu": ("x86_64", "amd64", "x86_64-linux-gnu", "x86-64"),
    "aarch64-unknown-linux-gnu": ("aarch64", "arm64", "aarch64-linux-gnu", "arm64-linux", "aarch64-unknown-linux-gnu", "cpu -march=arm64"),
    "riscv64-unknown-linux-gnu": ("riscv64", "riscv64-linux-gnu", "riscv64gc", "rv64gcv"),
    "armv7-unknown-linux-gnueabihf": ("armv7", "armhf", "arm-linux-gnueabihf", "armv7l", "cpu -mcpu=cortex-a9"),
    "wasm32-unknown-unknown": ("wasm32", "wasm", "wasm32-simd128", "wasm32-unknown-unknown", "cpu -march=wasm32"),
    "x86_64-w64-windows-gnu": ("x86_64-windows", "x86_64-pc-windows-msvc", "x86_64-w64-mingw32", "cpu -march=x86_64 -os=windows"),
    "arm64-apple-macosx11.0.0": ("arm64-apple-darwin", "aarch64-apple-darwin23", "arm64-macos", "cpu -mcpu=apple-m1 -os=macos"),
}
MAGIC = {"elf": b"\x7fELF", "wasm": b"\0asm", "macho": b"\xcf\xfa\xed\xfe", "coff": b"\x64\x86"}


@pytest.mark.parametrize("triple", NAMES)
def test_platforms_have_many_names(triple):
    for name in NAMES[triple]:
        target = CpuTarget.parse(name)
        assert target.triple == triple, name
        assert Target.parse(str(target)) == target
        assert CpuTarget.baseline(triple).platform == target.platform


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpu -mcpu=apple-m1", "-os=macos, or -os=linux"),
        ("arm64 -mcpu=apple-m1", "-os=macos, or -os=linux"),
        ("riscv64 -os=windows", "no code can be made for riscv64 under windows"),
        ("powerpc64le-linux-gnu", "riscv64 (linux)"),
        ("aarch64-linux-android", "unknown target"),
        ("wasm32-wasi", "unknown target"),
        ("x86_64-apple-darwin", "one of x86_64 (linux), aarch64 (linux)"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_can(text, message):
    with pytest.raises(TargetError) as refusal:
        Target.parse(text)
    assert message in str(refusal.value)


def test_apple_silicon_under_linux_is_said():
    target = Target.parse("cpu -mcpu=apple-m1 -os=linux")
    assert target.triple == "aarch64-unknown-linux-gnu" and "-os=linux" in str(target) and Target.parse(str(target)) == target
    assert not CpuTarget.parse("arm64-macos").runs_on(target)


@pytest.mark.parametrize("platform", [p for p in PLATFORMS.values() if p.linker], ids=lambda p: p.triple)
def test_code_of_each_platform_has_its_format(platform):
    """A model with free sizes, a copy, and a check of indices; where this package is not a linker, its objects."""
    options = CompileOptions(target=f"cpu -march={platform.arch} -os={platform.os}", dims={"n": (1, 4)})
    artifact = compile_model(models.convolutional(), options)[0]
    assert artifact.manifest.triple == platform.triple
    assert all(o.startswith(MAGIC[platform.format]) for o in members(artifact.code))


def test_archives_are_checked():
    contents = [b"a", b"", b"bcd"]
    assert members(archive([(f"{n}.o", content, ()) for n, content in enumerate(contents)])) == contents
    whole = archive([("0.o", b"abc", ())])
    for damaged in (b"", b"\x7fELF", whole[:-4], whole[:-3], whole[:-2], whole + b"x"):
        with pytest.raises(CodegenError):
            members(damaged)


def test_kernels_alone_are_not_for_other_linkers():
    with pytest.raises(TargetError, match="package a whole model"):
        CpuBackend(CpuTarget.parse("riscv64")).link_functions([])
