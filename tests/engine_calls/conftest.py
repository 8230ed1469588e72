"""The plugin of vLLM over stand-ins of each recorded version."""

from __future__ import annotations

from typing import Any

import pytest

from engine_calls import fake_vllm
from engine_calls.fake_vllm import SEAMS


@pytest.fixture(params=list(SEAMS))
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def plugin(version: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin after registration with FI_VLLM_LAYERS=1."""
    monkeypatch.setenv("FI_VLLM_LAYERS", "1")
    found = fake_vllm.install(version, monkeypatch)
    found.register()
    return found


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
