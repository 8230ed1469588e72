"""Errors of synchronisation that `tools/delays.py --planted` puts into copies of three kernels: it must see them.

Each takes the place of a line in a header: a wait that goes, a count that is one lower, a release before the last read,
a barrier that goes, a fence that goes, an arrival that goes. A missing fence need not show: a delay gives the store
more time to be seen. The census (tests/kernels/census.py) sees it by its PTX, and all others but a count.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

MLA, GEMM, FP8_GEMM, PREFILL, NO_KEYS = (
    "--routine BatchMLAPagedAttentionWrapper --batch_size 40 --s_kv 8001 --num_qo_heads 64 --num_kv_heads 1 "
    "--head_dim_ckv 512 --head_dim_kpe 64 --page_size 64",
    "--routine mm_bf16 --m 1000 --n 2048 --k 4096",
    "--routine gemm_fp8_nt_groupwise --m 4000 --n 7168 --k 2048",
    "--routine BatchPrefillWithRaggedKVCacheWrapper --batch_size 8 --s_qo 1500 --s_kv 1500 --num_qo_heads 16 "
    "--num_kv_heads 4 --q_dtype fp8_e4m3 --kv_dtype fp8_e4m3 --out_dtype bfloat16 --causal",
    "call BatchPrefillWithRaggedKVCacheWrapper batch_size=4 qo_len=3000 kv_len=50 num_qo_heads=16 num_kv_heads=4 "
    "dtype=float8_e4m3fn kv_dtype=float8_e4m3fn o_dtype=bfloat16",
)


class Planted(NamedTuple):
    """An error: `old`, which occurs once in the header, becomes `new`. It shows with the delays of one of `groups`."""

    kind: str
    line: str
    header: str  # below include/fi
    old: str
    new: str
    groups: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind} of {Path(self.header).stem}"

    def edit(self, include: Path) -> None:
        """Changes the header below a copy of the include folder."""
        header = include / "fi" / self.header
        text = header.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.header} must have once:\n{self.old}")
        header.write_text(text.replace(self.old, self.new))


_MLA, _PRODUCER = "attention/mla/batch_mla_sm90.cuh", "attention/mla/mla_producer_sm90.cuh"
_LOOP, _GEMM, _STORES = "gemm/mainloop_sm90.cuh", "gemm/gemm_sm90.cuh", "gemm/epilogue_tma_sm90.cuh"
_FP8 = "attention/prefill/batch_prefill_fp8_sm90.cuh"
_PASS_ON = "pass_on_warp(shared.v_pipeline, from.stage, shared.column_pipeline, to.stage, lane);"
ERRORS = (
    Planted("wait", MLA, _MLA, "    shared.p_full.wait(number & 1);\n", "", ("barriers", "arrivals")),
    Planted("count", MLA, _PRODUCER, "p_full.init(kWarpgroup)", "p_full.init(kWarpgroup - 32)", ("arrivals", "waits")),
    Planted(
        "release", MLA, _MLA, "    warpgroup_sync(1 + c.group);  // all warps have read the other's probabilities\n",
        "    release(at.stage, c.group);\n    warpgroup_sync(1 + c.group);\n", ("barriers", "patience"),
    ),
    Planted(
        "barrier", MLA, _MLA, "    barrier_sync(3, 2 * kWarpgroup);\n    if (lane == 0) shared.q_empty.arrive();",
        "    if (lane == 0) shared.q_empty.arrive();", ("barriers", "waits"),
    ),
    Planted("arrival", MLA, _MLA, "    shared.p_full.arrive();", "", ("patience",)),
    Planted("fence", MLA, _MLA, "fence_async_shared();    // order: writer: wgmma of", "// wgmma of",
            ("arrivals",)),
    Planted("wait", GEMM, _LOOP, "      ring.pipeline.wait(at);\n", "", ("copies",)),
    Planted("count", GEMM, _GEMM, "ring.pipeline.init(1, kConsumers * 4)", "ring.pipeline.init(1, kConsumers * 4 - 1)",
            ("waited", "arrivals")),
    Planted("release", GEMM, _LOOP, "      ring.pipeline.wait(at);\n",
            "      ring.release(at.stage);\n      ring.pipeline.wait(at);\n", ("waited", "patience")),
    Planted("barrier", FP8_GEMM, _STORES, "    staged[w][m_block].wait(phase);\n", "", ("arrivals",)),
    Planted("arrival", GEMM, _LOOP, "      if (k > 0) ring.release(before);\n", "", ("patience",)),
    Planted("fence", FP8_GEMM, _STORES, "    fence_async_shared();", "", ("arrivals",)),
    Planted("wait", PREFILL, _FP8, "        shared.column_pipeline.wait(column_at);\n", "", ("waits",)),
    Planted("count", PREFILL, _FP8, "column_pipeline.init(kTransposers, kConsumers)",
            "column_pipeline.init(kTransposers - 1, kConsumers)", ("waited", "arrivals")),
    Planted("release", PREFILL, _FP8, "        shared.k_pipeline.wait(k_at);\n",
            "        if (thread == 0) shared.k_pipeline.release(k_at.stage);\n        shared.k_pipeline.wait(k_at);\n",
            ("waited", "patience")),
    # The barrier stands behind products, at which the four warps meet: it matters for tiles without keys.
    Planted("barrier", NO_KEYS, _FP8, "      warpgroup_sync(1 + group);\n      if (thread == 0) shared.work_pipeline",
            "      if (thread == 0) shared.work_pipeline", ("waited", "waits")),
    Planted("arrival", PREFILL, _FP8, _PASS_ON, "shared.v_pipeline.release_warp(from.stage, lane);", ("patience",)),
    Planted("fence", PREFILL, _FP8, _PASS_ON, "__syncwarp();\n        if (lane == 0) shared.v_pipeline.release("
            "from.stage), shared.column_pipeline.commit(to.stage);", ("arrivals",)),
)  # fmt: skip
