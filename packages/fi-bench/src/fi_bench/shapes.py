"""Shapes of served models, and the test lines made from them; the only place that names models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Model(NamedTuple):
    """Dimensions of one transformer, whole (tensor parallel 1). kv_heads 0: latent attention."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = {
    "llama3-8b": Model(4096, 14336, 32, 8, 128),
    "llama3-70b": Model(8192, 28672, 64, 8, 128),
    "llama3-405b": Model(16384, 53248, 128, 8, 128),
    "llama3-1b": Model(2048, 8192, 32, 8, 64),
    "mistral-7b": Model(4096, 14336, 32, 8, 128),
    "mixtral-8x7b": Model(4096, 14336, 32, 8, 128),
    "qwen3-8b": Model(4096, 12288, 32, 8, 128),
    "qwen3-32b": Model(5120, 25600, 64, 8, 128),
    "gemma2-9b": Model(3584, 14336, 16, 8, 256),
    "gpt-oss-120b": Model(2880, 2880, 64, 8, 64),
    "deepseek-v3": Model(7168, 18432, 128, 0, 128),
}
PHASES = {
    "decode": "batch sizes 1 to 256, one token each, 4096 tokens of context",
    "prefill": "prompts of 1024, 4096 and 16384 tokens",
}
_TP = (1, 2, 4, 8)
_PAGE_SIZE = 16


# (n, k) of shards of linear attention, of shared experts and of models with a hidden size of 5120 and 6144 on eight
# ranks, and of latent attention and its output, which no Model above gives.
EIGHT_RANKS = ((576, 5120), (5120, 1024), (5120, 288), (1792, 5120), (25600, 6144), (4096, 1280))
_PROJECTIONS = (
    *EIGHT_RANKS,
    (2112, 7168),
    (24576, 1536),
    (3072, 1536),
    (7168, 16384),
    (7168, 2048),
    (36864, 7168),
    (7168, 18432),
    (4608, 7168),
    (7168, 2304),
)


def projections() -> list[tuple[int, int]]:
    """(n, k) of the matrix products of the models on 1 to 8 ranks: q, k and v together, output, gate with up, down."""
    found = dict.fromkeys(_PROJECTIONS)
    for model in MODELS.values():
        for tp in _TP if model.kv_heads else ():
            m = _shard(model, tp)
            heads = m.heads * m.head_dim
            qkv = heads + 2 * m.kv_heads * m.head_dim, m.hidden
            found |= dict.fromkeys((qkv, (m.hidden, heads), (2 * m.intermediate, m.hidden), (m.hidden, m.intermediate)))
    return list(found)


def names() -> list[str]:
    """Every preset: MODEL[-tpN]-PHASE."""
    return [f"{model}{'' if tp == 1 else f'-tp{tp}'}-{phase}" for model in MODELS for tp in _TP for phase in PHASES]


def lines(name: str) -> Iterator[str]:
    """The test lines of a model's preset."""
    stem, phase = name.rsplit("-", 1)
    model, _, tp = stem.partition("-tp")
    return _lines(_shard(MODELS[model], int(tp or 1)), phase)


def _shard(model: Model, tp: int) -> Model:
    kv = max(model.kv_heads // tp, 1) if model.kv_heads else 0
    return model._replace(intermediate=model.intermediate // tp, heads=model.heads // tp, kv_heads=kv)


def _lines(m: Model, phase: str) -> Iterator[str]:
    decode = phase == "decode"
    rows = "1,4,16,64,256" if decode else "1024,4096,16384"
    for routine in ("rmsnorm", "fused_add_rmsnorm"):
        yield f"--routine {routine} --batch_size {rows} --hidden_size {m.hidden}"
    yield f"--routine silu_and_mul --batch_size {rows} --hidden_size {m.intermediate}"
    if not m.kv_heads:
        yield (
            f"--routine BatchMLAPagedAttentionWrapper --batch_size {'1,4,16,64,256' if decode else '1'} --s_kv 4096 "
            f"--s_qo {1 if decode else 1024} --num_qo_heads {m.heads} --num_kv_heads {m.heads} --page_size 64 "
            "--head_dim_ckv 512 --head_dim_kpe 64"
        )
        return
    heads = f"--num_qo_heads {m.heads} --num_kv_heads {m.kv_heads}"
    dims = f"--head_dim_qk {m.head_dim} --head_dim_vo {m.head_dim}"
    tokens = f"--batch_size {rows} --seq_len 1" if decode else f"--batch_size 1 --seq_len {rows}"
    yield f"--routine apply_rope_pos_ids_inplace {tokens} {heads} --head_dim {m.head_dim} --input_dtype bfloat16"
    appended = (
        f"--batch_size {rows} --s_qo 1 --s_kv 4096" if decode else f"--zip --batch_size 1 --s_qo {rows} --s_kv {rows}"
    )
    yield (
        f"--routine append_paged_kv_cache {appended} --num_kv_heads {m.kv_heads} --head_dim {m.head_dim} "
        f"--page_size {_PAGE_SIZE}"
    )
    if decode:
        yield f"--routine single_decode_with_kv_cache --s_kv 4096 {heads} {dims}"
        yield (
            f"--routine BatchDecodeWithPagedKVCacheWrapper --batch_size {rows} --s_kv 4096 {heads} {dims} "
            f"--page_size {_PAGE_SIZE}"
        )
    else:
        yield f"--routine single_prefill_with_kv_cache --zip --s_qo {rows} --s_kv {rows} {heads} {dims} --causal"
        yield (
            f"--routine BatchPrefillWithPagedKVCacheWrapper --zip --batch_size 1 --s_qo {rows} --s_kv {rows} {heads} "
            f"{dims} --page_size {_PAGE_SIZE} --causal"
        )
