"""Toy functions and classes whose calls are dumped, and the fixture that dumps them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fi_core.observe import api, log
from fi_core.observe.dump import Dumper
from fi_core.observe.log import Settings, fi_api

SCALE = 2.0  # changed by tests so that a replay differs
EXTRA_ROWS = 0


def scale(x: Any, factor: float = 1.0, *, pair: Any = None, act: Any = None, dtype: Any = None) -> Any:
    out = x * factor * SCALE
    if pair is not None:
        out = out + pair["a"] * pair["b"][1]
    return out.to(dtype) if dtype else out


def split(x: Any) -> Any:
    return x + SCALE, None, x.shape[0] + EXTRA_ROWS


def fails(x: Any) -> Any:
    raise RuntimeError("of the op")


def zero_(x: Any) -> None:
    x.zero_()


def double_into(out: Any, x: Any, workspace_buffer: Any = None) -> Any:
    workspace_buffer.random_()
    torch.mul(x, SCALE, out=out)


def draw(x: Any, generator: Any = None) -> Any:
    return x + torch.rand(x.shape, generator=generator)


def describe_only(*values: Any, **named: Any) -> None: ...


class ScaleWrapper:
    def __init__(self, factor: float, buffer: Any = None, jit_args: Any = None) -> None:
        self.factor, self.buffer = factor, buffer

    def plan(self, by: float) -> None:
        self.factor *= by

    def run(self, x: Any) -> Any:
        return x * self.factor if self.buffer is None else x * self.buffer

    def run_twice(self, x: Any) -> Any:
        self.plan(2.0)
        return self.run(x)


class ChildWrapper(ScaleWrapper):
    def __init__(self) -> None:
        super().__init__(5.0)


@pytest.fixture
def dumper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Dumper]:
    """Level 10, with the ops of this file decorated."""
    handlers = log.logger.handlers[:], log.logger.propagate
    log.logger.handlers[:] = [logging.NullHandler()]
    made = Dumper(tmp_path / "dumps", 1e9, 1000, log.logger)
    monkeypatch.setattr(log, "settings", Settings(10))
    monkeypatch.setattr(log, "dumper", made)
    monkeypatch.setattr(api, "functions", dict(api.functions))
    monkeypatch.setattr(api, "classes", dict(api.classes))
    here = sys.modules[__name__]
    for name in ("scale", "split", "fails", "zero_", "double_into", "draw", "describe_only"):
        monkeypatch.setattr(here, name, fi_api(getattr(here, name)))
    for owner in (ScaleWrapper, ChildWrapper):
        monkeypatch.setattr(owner, "__init__", owner.__init__)  # so that it is undone
        fi_api(owner)
    for name in ("plan", "run", "run_twice"):
        monkeypatch.setattr(ScaleWrapper, name, fi_api(getattr(ScaleWrapper, name)))
    monkeypatch.setattr(here, "SCALE", 2.0)
    monkeypatch.setattr(here, "EXTRA_ROWS", 0)
    yield made
    log.logger.handlers[:], log.logger.propagate = handlers


def calls(dumper: Dumper) -> list[Path]:
    return sorted(path for path in dumper.root.iterdir() if path.is_dir())


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metadata.jsonl").read_text().splitlines()]
