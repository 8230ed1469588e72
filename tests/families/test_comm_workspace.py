"""The workspace of an exchange between ranks on CPUs: what it cannot hold is refused."""

from __future__ import annotations

import pytest
import torch

from fi_core import comm
from fi_core.comm.mnnvl import MnnvlConfig, OneRank


def test_experts_that_the_workspace_cannot_hold() -> None:
    """Ranks on CPUs publish their experts in a rotation, which is as long as the payloads need."""
    config, mapping = MnnvlConfig(comm_backend=OneRank()), comm.Mapping(1, 0, tp_size=1, moe_ep_size=1)
    exchange = comm.MoeAlltoAll(
        mapping, 8, 2, 4, hidden_size=64, mnnvl_config=config, device=torch.device("cpu"), timeout=20.0
    )
    room = exchange._exchange.rotation_bytes
    chosen = torch.zeros(1, room // 4, dtype=torch.int32)  # and their number
    with pytest.raises(ValueError, match=f"a rotation must have {room + 4} bytes; got {room}"):
        exchange.dispatch(chosen, [torch.zeros(1, 64, dtype=torch.bfloat16)], 8)
