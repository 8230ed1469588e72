"""Every op test takes `device`: the CPU here, the card where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checked(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Contents of tables are checked: by default on the CPU, with FI_CHECK=1 on CUDA. Kernels are bound again."""
    from fi_core.registry import load
    from fi_core.runtime.resolve import checks

    if device == "cpu":
        yield
        return
    monkeypatch.setattr(checks, "_CHECK", True)
    for operator in load().values():
        monkeypatch.setattr(operator, "kernels", {})
        operator.forget()
    yield
    for operator in load().values():
        operator.forget()
