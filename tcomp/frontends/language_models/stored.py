"""Matrices in few bits, and the files of GPTQ and AWQ that have such: integers of 32 bits, several numbers in each, the lowest bits first.

GPTQ    qweight [in / each, out]: numbers of neighbours along `in`; qzeros [groups, out / each], in the first version of the format less 1;
        scales [groups, out]; g_idx [in]: the group of each, where they are not in order
AWQ     qweight [in, out / 8], qzeros [groups, out / 8]: numbers of eight neighbours along `out`, the even ones first; scales [groups, out]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.ops.quantization import packed

Read = Callable[..., np.ndarray]  # (name, shape, whether it holds int32 instead of floats) -> the tensor
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the numbers of eight neighbours stand


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix [out, in] in few bits, or one of each expert: `numbers` uint8 [..., out, bytes], the lowest bits first, `scales` [..., out,
    blocks], and the numbers that stand for zero, uint8 of the same shape. See `ops.quantization.block_product`."""

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    bits: int
    block: int

    def __getitem__(self, rows: np.ndarray) -> StoredBlocks:
        """Some of its rows."""
        return StoredBlocks(self.numbers[rows], self.scales[rows], self.zeros[rows], self.bits, self.block)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a folder packs its matrices: `group` numbers of a row share a scale, all of them where it is 0."""

    method: str
    bits: int
    group: int
    less: int  # by what zeros are stored too low

    def read(self, read: Read, names: Mapping[str, object], base: str, out: int, size: int) -> StoredBlocks | np.ndarray:
        """The matrix [out, size] called `base`; as floats where its groups are not in order. Raises `ImportModelError` for sizes that do
        not divide, and what `read` raises."""
        each, block = 32 // self.bits, self.group or size
        if out % each or size % block or size % each or block % (8 // self.bits):
            raise ImportModelError(f"`{base}` [{out}, {size}] does not divide into groups of {block} numbers of {self.bits} bits")
        scales, words = read(f"{base}.scales", (size // block, out)).T, read(f"{base}.qzeros", (size // block, out // each), True)
        zeros = _unpacked(words, self.bits)
        if self.method == "awq":
            columns = _unpacked(read(f"{base}.qweight", (size, out // each), True), self.bits)
            numbers = packed(_in_order(columns).T, self.bits)
            zeros = _in_order(zeros)
        else:
            numbers = np.ascontiguousarray(read(f"{base}.qweight", (size // each, out), True).T).view(np.uint8)
        zeros = zeros.T + np.uint8(self.less)
        if f"{base}.g_idx" in names and ((groups := read(f"{base}.g_idx", (size,), True)) != np.arange(size) // block).any():
            if groups.min() < 0 or groups.max() >= size // block:
                raise ImportModelError(f"`{base}.g_idx` has groups that there are not")
            floats: np.ndarray = (_unpacked(numbers, self.bits).astype(np.float32) - zeros[:, groups]) * scales[:, groups].astype(
                np.float32
            )
            return floats
        return StoredBlocks(numbers, np.ascontiguousarray(scales), np.ascontiguousarray(zeros), self.bits, block)


def packing(config: Mapping[str, Any], where: str) -> Packing | None:
    """That which a config tells; None for floats. Raises `UnsupportedError` for another one."""
    given = config.get("quantization_config")
    if given is None:
        return None
    given = given if isinstance(given, Mapping) else {}
    method = given.get("quant_method")
    bits = given.get("bits", given.get("w_bit"))
    group = given.get("group_size", given.get("q_group_size"))
    known = (method == "gptq" and bits in (2, 4, 8)) or (method == "awq" and bits == 4 and given.get("version", "gemm") == "gemm")
    if not known or not isinstance(group, int) or isinstance(group, bool) or not (group == -1 or 1 <= group <= 1 << 20):
        why = f"quantization by {method!r:.40} of {bits!r:.10} bits in groups of {group!r:.20}"
        raise UnsupportedError("weights that are quantized in another way", where=where, why=why, hint="GPTQ and AWQ are read")
    return Packing(str(method), int(bits), max(group, 0), int(method == "gptq" and given.get("checkpoint_format", "gptq") == "gptq"))


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The numbers in the last axis of integers, as uint8."""
    data = np.ascontiguousarray(words).view(np.uint8)
    parts = [(data >> np.uint8(shift)) & np.uint8((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*data.shape[:-1], -1)


def _in_order(numbers: np.ndarray) -> np.ndarray:
    return numbers.reshape(*numbers.shape[:-1], -1, 8)[..., _AWQ_ORDER].reshape(numbers.shape)
