"""The launcher of mqa_logits on Hopper without a GPU: who shares tiles of keys, and top-k in the same launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

LOGITS, Q, KEYS, WEIGHTS, ENDS, TABLE, STARTS, SCALES, INDICES, STATE = (0x7F001000000 * (i + 1) for i in range(10))
HEADS, DIM, PAGE, PAGES = 64, 128, 64, 6
Indexer = Callable[..., list[Call]]


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calls the op on requests with next_n rows, or on rows of one array if next_n is 0; the driver calls."""
    folder = tmp_path_factory.mktemp("indexer")
    gpu = Gpu(build_driver(folder), Path(folder) / "log", 90)

    def call(batch: int, next_n: int, top_k: int = 0, **change: Any) -> list[Call]:
        rows, columns = batch * max(next_n, 1), PAGES * PAGE
        arguments: dict[str, Any] = {
            "logits": Tensor(LOGITS, (rows, columns), "f32"),
            "weights": Tensor(WEIGHTS, (rows, HEADS), "f32"),
            "ends": Tensor(ENDS, (batch,), "i32"),
        }
        if next_n:
            arguments |= {
                "q": Tensor(Q, (batch, next_n, HEADS, DIM), "e4m3"),
                "keys": Tensor(KEYS, (99, PAGE, 1, DIM + 4), "u8"),
                "block_table": Tensor(TABLE, (batch, PAGES), "i32"),
            }
        else:
            arguments |= {
                "q": Tensor(Q, (batch, HEADS, DIM), "e4m3"),
                "keys": Tensor(KEYS, (columns, DIM), "e4m3"),
                "key_scales": Tensor(SCALES, (columns,), "f32"),
                "starts": Tensor(STARTS, (batch,), "i32"),
                "relative": True,
            }
        if top_k:
            arguments["indices"] = Tensor(INDICES, (rows, top_k), "i32")
            arguments["state"] = Tensor(STATE, (rows, 8324), "i32")
        name, rows = ("wgmma_select_sm90", 1 << min(2, (next_n - 1).bit_length())) if top_k else ("wgmma_sm90", 0)
        axes = {"heads": HEADS, "dim": DIM, "paged": next_n > 0, "rows": rows}
        return gpu.call("mqa_logits", axes, arguments | change, implementation=name)

    yield call
    gpu.close()


@pytest.mark.parametrize("top_k", [0, 2048])
def test_one_cta_of_a_multiprocessor_takes_the_rows_of_a_request_at_once(indexer: Indexer, top_k: int) -> None:
    """With top-k all CTAs run at the same time, as they wait for each other."""
    form = "mqa_select" if top_k else "mqa_logits"
    forms = [(1, "paged_1_1"), (2, "paged_2_1"), (3, "paged_2_2"), (9, "paged_2_2")]
    for next_n, name in forms if top_k else [*forms, (0, "ragged_2_2")]:
        (launch,) = launches(indexer(70, next_n, top_k))
        assert launch["name"] == f"{form}_{name}"
        assert launch["grid"] == [132, 1, 1] and launch["block"] == [384, 1, 1]
        assert bool(launch["cooperative"]) == bool(top_k)


def test_keys_and_queries_are_described_by_boxes(indexer: Indexer) -> None:
    maps = {c["address"]: c["dimensions"] for c in indexer(3, 2) if c["call"] == "tensor_map"}
    assert [size for size, _, _ in maps[KEYS]] == [DIM, PAGE, 99]
    assert [box for *_, box in maps[KEYS]] == [DIM, PAGE, 1]
    assert [box for *_, box in maps[Q]] == [DIM, HEADS, 2]
    maps = {c["address"]: c["dimensions"] for c in indexer(300, 0) if c["call"] == "tensor_map"}
    assert [box for *_, box in maps[KEYS]] == [DIM, 64]


def test_top_k_gets_where_results_and_state_lie(indexer: Indexer) -> None:
    (launch,) = launches(indexer(3, 2, 100, mapped=True, prefer_last=True))
    p = parameters(launch, "MqaLogitsParams")
    assert [p[name] for name in ("indices", "state", "scores", "logits")] == [INDICES, STATE, None, LOGITS]
    assert [p[name] for name in ("top_k", "mapped", "prefer_last", "orders_nan", "clean")] == [100, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clean": True}, r"indices must be \[rows, 1 to 2048\] of logits that are paged and not clean"),
        ({"state": Tensor(STATE, (6, 8000), "i32")}, "state of a row"),
        ({"state": Tensor(STATE + 4, (6, 8324), "i32")}, "multiples of 16 bytes"),
        ({"indices": Tensor(INDICES, (6, 2049), "i32")}, "1 to 2048"),
    ],
)
def test_what_top_k_cannot_take_is_refused(indexer: Indexer, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        indexer(3, 2, 100, **change)


def test_top_k_of_rows_of_one_array_is_refused(indexer: Indexer) -> None:
    """Two kernels are faster for prompts."""
    with pytest.raises(ValueError, match="of logits that are paged"):
        indexer(3, 0, 100)
