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
from fi_core.errors import BackendSupportedError
from fi_core.quantization.layout import SfLayout


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


def test_a_workspace_is_made_where_torch_makes_tensors_elsewhere() -> None:
    """Engines make the layers of a model with a default device; what the host reads stays on it."""
    with torch.device("meta"):
        workspace = comm.create_allreduce_fusion_workspace(
            max_token_num=8, hidden_dim=64, dtype=torch.float32, comm_backend=OneRank(), device=torch.device("cpu")
        )
        config, mapping = MnnvlConfig(comm_backend=OneRank()), comm.Mapping(1, 0, tp_size=1, moe_ep_size=1)
        exchange = comm.MoeAlltoAll(
            mapping, 8, 2, 4, hidden_size=64, mnnvl_config=config, device=torch.device("cpu"), timeout=20.0
        )
    x, chosen = torch.ones(2, 64), torch.zeros(2, 2, dtype=torch.int32)
    assert torch.equal(comm.allreduce_fusion(x, workspace, 0), x)
    [received] = exchange.dispatch(chosen, [x], 8)
    assert torch.equal(received[0, :2], x)


def test_the_size_of_what_merges_partial_attention() -> None:
    """The bytes that the allocation takes: they do not depend on the message, which takes more launches."""
    size = comm.decode_cp_a2a_lse_reduce_workspace_size
    workspace = comm.AllToAllWorkspace(torch.device("cpu"), OneRank())
    if not torch.cuda.is_available():
        assert size(8, 4, 1, 128, torch.float16) == workspace.buffer.numel()
    with pytest.raises(ValueError, match="max_tokens, local_heads, cp_size and head_dim must be positive; got 8, 0, 2"):
        size(8, 0, 2, 128, torch.float16)
    with pytest.raises(TypeError, match=r"dtype must be torch\.float16 or torch\.bfloat16; got torch\.float32"):
        size(8, 4, 2, 128, torch.float32)


def test_a_workspace_of_a_mapping() -> None:
    """It has the sizes of FlashInfer's for multi-node NVLink, and serves the ranks of a host."""
    tp, strategy = comm.Mapping(1, 0, tp_size=1), comm.trtllm_mnnvl_ar.MNNVLAllreduceFusionStrategy
    workspace = comm.MNNVLAllReduceFusionWorkspace(tp, 300, 64, torch.bfloat16, comm_backend=OneRank())
    assert workspace.backend == "mnnvl" and workspace.buffer_size_bytes == 2 * 300 * 64 * 2
    needed = workspace.get_required_buffer_size_bytes
    assert needed(4, 10, 64, torch.float16) == needed(4, 10, 64, torch.float16, strategy.ONESHOT) == 4 * 10 * 64 * 2
    assert needed(4, 9, 64, torch.float16, strategy.TWOSHOT) == 2 * 12 * 64 * 2
    assert needed(4, 1 << 14, 64, torch.float16) == 2 * (1 << 14) * 64 * 2  # above 1 MB of all ranks
    assert workspace.is_buffer_size_sufficient(1, 600, 64, torch.bfloat16)
    assert not workspace.is_buffer_size_sufficient(1, 601, 64, torch.bfloat16)
    assert not workspace.is_buffer_size_sufficient(2, 1, 64, torch.bfloat16)
    x = torch.randn(300, 64).bfloat16()
    out = torch.full_like(x, torch.nan)
    comm.allreduce_fusion(x, workspace, comm.AllReduceFusionPattern.kAllReduce, output=out)
    assert torch.equal(out, x)
    workspace.destroy()
    sized = comm.MNNVLAllReduceFusionWorkspace(tp, buffer_size_in_bytes=1 << 20, comm_backend=OneRank())
    assert sized.is_buffer_size_sufficient(1, 128, 4096, torch.bfloat16)
    with pytest.raises(ValueError, match="max_num_tokens, hidden_dim and dtype must be given without buffer_size_in_b"):
        comm.MNNVLAllReduceFusionWorkspace(tp, 8, comm_backend=OneRank())
    with pytest.raises(ValueError, match="buffer_size_in_bytes must be 1 to 4294967295; got 0"):
        comm.MNNVLAllReduceFusionWorkspace(tp, buffer_size_in_bytes=0, comm_backend=OneRank())


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


def _exchange() -> comm.MoeAlltoAll:
    config, mapping = MnnvlConfig(OneRank()), comm.Mapping(1, 0, tp_size=1, moe_ep_size=1)
    return comm.MoeAlltoAll(mapping, 4, 1, 4, hidden_size=8, mnnvl_config=config, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("step", "option"),
    [
        ("dispatch", {"eplb_local_stats": torch.ones(4, dtype=torch.int32)}),
        ("combine", {"output_scales": torch.ones(4)}),
        ("combine", {"output_scalar_scale": 2.0}),
        ("combine", {"sf_layout": SfLayout.layout_128x4}),
        ("combine", {"use_low_precision": True}),
    ],
)
def test_an_exchange_refuses_what_it_lacks(step: str, option: dict[str, Any]) -> None:
    """The argument is named, and the state of the exchange stays: the plain call succeeds after."""
    exchange, ids = _exchange(), torch.zeros(3, 1, dtype=torch.int32)
    refused = pytest.raises(NotImplementedError, match=f"{next(iter(option))}: not supported, leave it out.*; got")
    if step == "dispatch":
        with refused:
            exchange.dispatch(ids, [ids], 4, **option)
    exchange.dispatch(ids, [ids], 4)
    if step == "combine":
        with refused:
            exchange.combine(torch.zeros(1, 4, 8), 4, **option)
    assert exchange.combine(torch.ones(1, 4, 8), 4).tolist() == [[1.0] * 8] * 3
    assert exchange.eplb_gathered_stats is None


def test_an_exchange_takes_a_mask_of_all_ranks_alone() -> None:
    """One that lacks a rank is refused before anything is exchanged: the plain call succeeds after."""
    exchange, ids, payload = _exchange(), torch.zeros(3, 1, dtype=torch.int32), torch.ones(1, 4, 8)
    every, none = comm.moe_a2a_active_rank_mask([0], 1), torch.zeros(1, dtype=torch.uint64)
    lacking = r"active_rank_mask: not supported, make a group .*; got 'a mask without ranks \[0\]'"
    with pytest.raises(NotImplementedError, match=lacking):
        exchange.dispatch(ids, [ids], 4, active_rank_mask=none)
    exchange.dispatch(ids, [ids], 4, active_rank_mask=every)
    with pytest.raises(NotImplementedError, match=lacking):
        exchange.combine(payload, 4, active_rank_mask=none)
    assert exchange.combine(payload, 4, active_rank_mask=every).tolist() == [[1.0] * 8] * 3
    with pytest.raises(
        ValueError, match=r"active_rank_mask must be uint64 \[1\] on the CPU.*; got torch.int64 \[1\] on"
    ):
        exchange.dispatch(ids, [ids], 4, active_rank_mask=none.long())


def test_functions_of_an_exchange_take_flashinfers_arguments() -> None:
    """By position, as engines call; the output is the caller's tensor."""
    exchange, ids, out = _exchange(), torch.tensor([[1], [0], [3]], dtype=torch.int32), torch.zeros(3, 8)
    about = comm.moe_a2a_initialize(exchange.workspace, 0, 1, 4, 0, backend="trtllm")
    group = (exchange.workspace, about, 4, 0, 1, 1)
    (received,), offset = comm.moe_a2a_dispatch(ids, [ids], *group, 4, True, None, False, None, recv_view_cache={})
    assert received.flatten().tolist()[:3] == [1, 0, 3]
    payload = torch.arange(32.0).view(1, 4, 8)
    linear = SfLayout.layout_linear
    found = comm.moe_a2a_combine(payload, 3, *group, offset, False, torch.float32, None, 1.0, linear, out)
    assert found is out and torch.equal(out, payload[0, :3])
    with pytest.raises(BackendSupportedError, match="backend: 'trtllm' is required; got 'nccl'"):
        comm.moe_a2a_initialize(exchange.workspace, 0, 1, 4, backend="nccl")


def test_a_workspace_of_trtllm_by_its_class() -> None:
    """Its positions are FlashInfer's: the size of the group before the rank; the base class cannot be made."""
    made = comm.TRTLLMAllReduceFusionWorkspace(1, 0, 8, 64, torch.bfloat16, OneRank())
    assert isinstance(made, comm.AllReduceFusionWorkspace) and made.backend == "trtllm"
    assert made.is_buffer_size_sufficient(1, 8, 64, torch.bfloat16)
    assert not made.is_buffer_size_sufficient(1, 9, 64, torch.bfloat16)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    assert torch.equal(comm.allreduce_fusion(x, made, comm.AllReduceFusionPattern.kAllReduce), x)
    with pytest.raises(ValueError, match="tp_size: 1, that of the group, is required; got 2"):
        comm.TRTLLMAllReduceFusionWorkspace(2, 0, 8, 64, torch.bfloat16, OneRank())
    with pytest.raises(TypeError, match="abstract"):
        comm.AllReduceFusionWorkspace(1, 0)  # type: ignore[abstract]


@pytest.mark.parametrize("ranks", [0, 9, 2.0])
def test_a_workspace_of_no_group_has_no_size(ranks: Any) -> None:
    with pytest.raises(ValueError, match=f"cp_size must be 1 to 8; got {ranks}"):
        comm.decode_cp_a2a_workspace_size(ranks)
