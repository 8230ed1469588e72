"""The workspace of an exchange between ranks on CPUs: what it cannot hold is refused."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch

from fi_core import comm
from fi_core.comm import memory
from fi_core.comm.mnnvl import MnnvlConfig, OneRank


def test_experts_that_the_workspace_cannot_hold() -> None:
    """Ranks on CPUs publish their experts in a rotation, which is as long as the payloads need."""
    config, mapping = MnnvlConfig(comm_backend=OneRank()), comm.Mapping(1, 0, tp_size=1, moe_ep_size=1)
    exchange = comm.MoeAlltoAll(
        mapping, 8, 2, 4, hidden_size=64, mnnvl_config=config, device=torch.device("cpu"), timeout=20.0
    )
    room = exchange.exchange.rotation_bytes
    chosen = torch.zeros(1, room // 4, dtype=torch.int32)  # and their number
    with pytest.raises(ValueError, match=f"a rotation must have {room + 4} bytes; got {room}"):
        exchange.dispatch(chosen, [torch.zeros(1, 64, dtype=torch.bfloat16)], 8)


def test_a_workspace_says_what_it_is() -> None:
    """SGLang reads metadata["use_fp32_lamport"], and gives fusion up without it."""
    sizes: dict[str, Any] = {
        "max_token_num": 8,
        "hidden_dim": 64,
        "comm_backend": OneRank(),
        "device": torch.device("cpu"),
    }
    for dtype in (torch.float32, torch.bfloat16):
        metadata = comm.create_allreduce_fusion_workspace(dtype=dtype, **sizes).metadata
        assert metadata["use_fp32_lamport"] is (dtype == torch.float32)
        assert metadata["buffer_size"] == 8 * 64 * dtype.itemsize and metadata["tp_size"] == 1
    with pytest.raises(
        ValueError, match="top_k: None is required, since backend 'mnnvl-cutedsl' alone takes it; got 3"
    ):
        comm.create_allreduce_fusion_workspace(dtype=torch.float32, top_k=3, **sizes)


def test_memory_of_a_rank_that_another_cannot_map_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank raises, unmaps the ranks that it has mapped, and frees its own."""
    done: list[str] = []

    class Runtime:
        def cudaMalloc(self, size: int) -> ctypes.c_void_p:
            return ctypes.c_void_p(100)

        def cudaIpcGetMemHandle(self, pointer: ctypes.c_void_p) -> Any:
            return memory.cudaIpcMemHandle_t()

        def cudaIpcOpenMemHandle(self, handle: Any) -> ctypes.c_void_p:
            done.append("open")
            if len(done) == 2:
                raise RuntimeError("no peer access")
            return ctypes.c_void_p(200 + len(done))

        def cudaIpcCloseMemHandle(self, pointer: ctypes.c_void_p) -> None:
            done.append(f"close {pointer.value}")

        def cudaFree(self, pointer: ctypes.c_void_p) -> None:
            done.append(f"free {pointer.value}")

    class Group(OneRank):
        def Get_rank(self) -> int:
            return 1

        def Get_size(self) -> int:
            return 4

        def allgather(self, data: Any) -> list[Any]:
            return [data] * 4

        def barrier(self) -> None:
            done.append("barrier")

    class Stream:
        def synchronize(self) -> None: ...

    monkeypatch.setattr(memory, "CudaRTLibrary", Runtime)
    monkeypatch.setattr(memory, "fill_empty", lambda buffer: None)
    monkeypatch.setattr(memory, "bytes_at", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream())
    with pytest.raises(RuntimeError, match="rank 1 cannot map the memory of rank 2: no peer access"):
        memory.SharedMemory(64, torch.device("cuda", 0), Group())
    assert done == ["open", "open", "open", "close 201", "close 203", "barrier", "free 100"]
