"""The definitions of all described functions are those that are kept, and templates are found by FlashInfer's paths."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fi_core
from fi_core.observe.trace import TraceTemplate
from fi_core.registry import described

FOLDER = Path(__file__).parent


def test_the_script_writes_a_definition_for_every_description(tmp_path: Path) -> None:
    """A description that changes, or a new one, changes the kept file: python tests/trace/example.py --keep."""
    command = [sys.executable, str(FOLDER / "example.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    written = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert done.stdout == f"{len(written)} definitions in {tmp_path}\n"
    kept = (FOLDER / "definitions.txt").read_text()
    assert sorted(row.split(": ")[0] for row in kept.splitlines()) == sorted(written)
    assert (tmp_path / "definitions.txt").read_text() == kept
    assert len(written) > 100 and "def " in written["rmsnorm_h136"]["reference"]


@pytest.mark.parametrize("family", ["norm", "attention", "gemm", "moe", "page", "rope", "sampling", "activation"])
def test_templates_of_a_family(family: str) -> None:
    assert isinstance(importlib.import_module(f"fi_core.trace.templates.{family}").rmsnorm_trace, TraceTemplate)


def test_the_package_has_its_traces() -> None:
    """`import fi_core as flashinfer` has `flashinfer.trace` and what is below it."""
    assert fi_core.trace.TraceTemplate is TraceTemplate
    templates = fi_core.trace.templates
    assert {"rmsnorm_trace", "BatchDecodeWithPagedKVCacheWrapper_trace"} <= set(dir(templates))
    assert templates.rmsnorm_trace is described("rmsnorm").template  # type: ignore[union-attr]
    with pytest.raises(AttributeError, match=r"'rmsnrm_trace'; did you mean 'rmsnorm_trace'\?"):
        templates.rmsnrm_trace  # noqa: B018
