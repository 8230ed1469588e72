"""FlashInfer's headers in the guide have headers that are here beside them: each that a guide to its kernels prints."""

from __future__ import annotations

import re
from pathlib import Path

import fi_kernels

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "custom-attention.md"
PRINTED = {
    *("attention/prefill.cuh", "attention/hopper/prefill_sm90.cuh", "attention/variants.cuh", "attention/mask.cuh"),
    *("attention/decode.cuh", "attention/cascade.cuh", "norm.cuh", "vec_dtypes.cuh", "pos_enc.cuh", "mma.cuh"),
    *("utils.cuh", "gemm/", "comm/"),
}


def test_the_table_of_headers() -> None:
    section = GUIDE.read_text().split("## Headers of FlashInfer")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")][1:]
    theirs = {name for row in rows for name in re.findall(r"`([\w/.]+)`", row[0])}
    ours = {name for row in rows for name in re.findall(r"`(fi/[\w/.]+)`", row[1])}
    assert theirs >= PRINTED
    assert len(ours) > 30
    assert [name for name in ours if not (fi_kernels.ROOT / "include" / name).is_file()] == []
