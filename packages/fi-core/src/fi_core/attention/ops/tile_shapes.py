"""Tile shapes of the mma.sync prefill kernel, and the shared memory that they need."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.runtime.spec.dtype import DTYPES, E2M1, DType
from fi_core.utils import round_up

# The 16-bit operand type of tensor cores that represents q and k exactly. Of a q of 16 bits and keys of the other 16 it
# is that of the keys, to which q is rounded.
MULTIPLY = {"f16": "f16", "bf16": "bf16", "e4m3": "f16", "e5m2": "f16"}


class TileShape(NamedTuple):
    """TileShape in mma_tile_loader.cuh: head dims per pass, m16 tiles per warp, warps, keys per stage."""

    dim_qk: int
    dim_vo: int
    m_tiles: int
    warps: int
    keys: int
    blocks: int  # a multiprocessor

    @property
    def rows(self) -> int:
        return 16 * self.m_tiles * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, kv: DType) -> int:
        """sizeof(MmaTileLoader::Shared), and the 128 bytes to which its start is aligned."""
        keys, rows = self.keys * (self.dim_qk + self.dim_vo), self.rows
        raw = keys // 2 if kv is E2M1 else keys if kv.bytes == 1 else 2 * 8 * kv.bytes
        angles = 4 * self.dim_qk if self.dim_qk > 128 else 2048
        more = 16 * self.m_tiles * self.threads + 32 * self.keys + 24 * rows + angles + 68
        scales = keys // 16 + 32 * self.keys + 8 if kv is E2M1 else 0  # and their addresses
        return round_up(round_up(2 * (rows * self.dim_qk + keys) + raw + more, 128) + scales, 128) + 128

    def body(self, kernel: str, q: str, kv: str) -> str:
        operand = kv if DTYPES[kv].bytes == 2 else MULTIPLY[q]
        names = (DTYPES[operand].device, DTYPES[q].device, DTYPES[kv].device)
        shape = f"fi::TileShape<{self.dim_qk}, {self.dim_vo}, {self.m_tiles}, {self.warps}, {self.keys}>"
        return f"{kernel}<{', '.join(names)}, {shape}, {self.shared_bytes(DTYPES[kv])}>"


# Any head dim, in passes of 128. H200, bf16, one ragged sequence of 16k, an early version of the kernel: 64 keys per
# stage 7492 us, 32 keys 9437; warps of 16 rows 10258, 8 warps 8156. With 8-bit keys, and in the kernel of single
# requests, 64 keys would spill a few registers.
TILE, TILE_OF_48 = TileShape(128, 128, 2, 4, 64, 2), TileShape(128, 128, 2, 4, 48, 2)
# Head dims above 128 in one pass, 16-bit keys; upper bounds of (head_dim_qk, head_dim_vo). H200, bf16, causal: 4 ragged
# requests of 4k, 128 heads of 192/128: 8258 us, in passes of 128 13648 (48 keys 8850); one request of 8k, 16/8 heads of
# 256: 1854 us, in passes 3004 (48 keys 2024, 8 warps 1906, output columns in two halves 2159).
WIDE_TILES = {192: TileShape(192, 128, 2, 4, 64, 2), 256: TileShape(256, 256, 1, 4, 64, 2)}
