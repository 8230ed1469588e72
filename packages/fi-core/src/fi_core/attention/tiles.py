"""Shapes of the tiles that prefill attention takes by mma.sync, and the shared memory they need."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.spec.dtype import DTYPES
from fi_core.utils import round_up

# Tensor cores multiply in the 16-bit type that holds q and k exactly.
MULTIPLY = {"f16": "f16", "bf16": "bf16", "e4m3": "f16", "e5m2": "f16"}


class TileShape(NamedTuple):
    """TileShape in tile_copies.cuh: head dims taken at a time, 16 rows of a warp so many times, warps, keys a step."""

    dim_qk: int
    dim_vo: int
    sixteens: int
    warps: int
    keys: int
    blocks: int  # a multiprocessor

    @property
    def rows(self) -> int:
        return 16 * self.sixteens * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, kv_bytes: int) -> int:
        """sizeof(TileCopies::Shared), and the 128 bytes to which its start is aligned."""
        keys, rows = self.keys * (self.dim_qk + self.dim_vo), self.rows
        raw = keys if kv_bytes == 1 else 2 * 8 * kv_bytes
        angles = 4 * self.dim_qk if self.dim_qk > 128 else 2048
        more = 16 * self.sixteens * self.threads + 32 * self.keys + 24 * rows + angles + 68
        return round_up(2 * (rows * self.dim_qk + keys) + raw + more, 128) + 128

    def body(self, kernel: str, q: str, kv: str) -> str:
        names = (DTYPES[MULTIPLY[q]].device, DTYPES[q].device, DTYPES[kv].device)
        shape = f"fi::TileShape<{self.dim_qk}, {self.dim_vo}, {self.sixteens}, {self.warps}, {self.keys}>"
        return f"{kernel}<{', '.join(names)}, {shape}, {self.shared_bytes(DTYPES[kv].bytes)}>"


# Any head dim, 128 at a time. H200, bf16, one ragged sequence of 16k, an early form of the kernel: 64 keys a step take
# 7492 us, 32 keys 9437; warps of 16 rows 10258, 8 warps 8156. Of 8-bit keys, and in the kernel of single requests, a
# few words of 64 would not stay in registers.
TILE, TILE_OF_48 = TileShape(128, 128, 2, 4, 64, 2), TileShape(128, 128, 2, 4, 48, 2)
# Head dims beyond 128 whole, 16-bit keys: (head_dim_qk, head_dim_vo) at most these. H200, bf16, causal: 4 ragged
# requests of 4k, 128 heads of 192/128, take 13648 us in chunks of 128 and 8258 so (48 keys 8850); one of 8k with 16/8
# heads of 256 3004 in chunks, 1854 so (48 keys 2024, 8 warps 1906, columns in two parts of 128 2159).
WIDE_TILES = {192: TileShape(192, 128, 2, 4, 64, 2), 256: TileShape(256, 256, 1, 4, 64, 2)}
