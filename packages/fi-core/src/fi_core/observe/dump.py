"""Level 10 of the API log: each call's inputs and outputs as files, from which `replay` runs it again.

A call is a directory with inputs.pt, outputs.pt and metadata.jsonl; its last record counts. A record that stayed at
"inputs_saved" is of a call that did not return. While a CUDA graph is captured nothing can be read back, so copies
become part of the graph, and `flush_graph_dumps` writes what they hold after a replay.
"""

from __future__ import annotations

import datetime
import inspect
import json
import logging
import os
import platform
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fi_core.env import env
from fi_core.utils import is_graph_capturing

if TYPE_CHECKING:
    import torch

Record = dict[str, Any]


def encode(key: str, value: Any, tensors: dict[str, torch.Tensor]) -> Record:
    """A JSON description of a value; its tensors go into `tensors`, under the key or under key__<member>."""
    import torch

    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        tensors[key] = value
        return {"type": "tensor"}
    if isinstance(value, Enum):
        return {"type": "enum", "class": _class_path(value), "name": value.name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"type": kind, "value": value}
    if type(value) in (list, tuple):
        return {"type": kind, "items": [encode(f"{key}__{i}", item, tensors) for i, item in enumerate(value)]}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return {"type": kind, "items": {name: encode(f"{key}__{name}", item, tensors) for name, item in value.items()}}
    if isinstance(value, (torch.dtype, torch.device)):
        return {"type": kind, "value": str(value).removeprefix("torch.")}
    return {"type": "object", "class": _class_path(value), "repr": repr(value)}


def encode_result(result: Any, tensors: dict[str, torch.Tensor]) -> Record:
    """Descriptions of what a call returned, member by member if it is a tuple."""
    parts = {f"result_{i}": item for i, item in enumerate(result)} if isinstance(result, tuple) else {"result": result}
    return {key: encode(key, value, tensors) for key, value in parts.items()}


def _self(value: Any) -> Record:
    return {"type": "self", "class": _class_path(value)}


def _class_path(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _details(tensor: torch.Tensor) -> Record:
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype),
        "device": str(tensor.device),
        "requires_grad": tensor.requires_grad,
        "is_contiguous": tensor.is_contiguous(),
    }


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass
class DumpedCall:
    """One call: its record as far as it is known, and where it is written."""

    dumper: Dumper
    name: str
    record: Record
    captured: bool

    def inputs(self, tensors: dict[str, torch.Tensor]) -> None:
        self.record["tensor_info"] = {"input_tensors": list(tensors), "output_tensors": []}
        self.record["tensor_details"] = {key: _details(tensor) for key, tensor in tensors.items()}
        self._save("inputs", tensors, "inputs_saved")

    def outputs(self, result: Any) -> None:
        tensors: dict[str, torch.Tensor] = {}
        self.record["output_metadata"] = encode_result(result, tensors)
        self.record["tensor_info"]["output_tensors"] = list(tensors)
        self.record["tensor_details"].update({key: _details(tensor) for key, tensor in tensors.items()})
        self._save("outputs", tensors, "completed")

    def _save(self, kind: str, tensors: dict[str, torch.Tensor], status: str) -> None:
        record = json.loads(json.dumps({**self.record, "execution_status": status}))  # as of now
        if self.captured:
            clones = {key: tensor.detach().clone() for key, tensor in tensors.items()}
            self.dumper.captured.append((self.name, kind, clones, record))
        else:
            self.dumper.write(self.dumper.root, self.name, kind, tensors, record)


@dataclass
class Dumper:
    """Writes calls below `root` until one of the limits is met."""

    root: Path
    max_bytes: float
    max_count: int
    logger: logging.Logger
    captured: list[tuple[str, str, dict[str, torch.Tensor], Record]] = field(default_factory=list)
    written_bytes: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    _flushes: int = 0
    _refused: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def from_env(cls, logger: logging.Logger) -> Dumper:
        return cls(env.dump_dir, env.dump_max_size_gb * 1e9, env.dump_max_count, logger)

    def inputs(
        self,
        func: Callable[..., Any],
        label: str,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> DumpedCall | None:
        """Save the inputs of a call; None if a limit forbids it."""
        tensors: dict[str, torch.Tensor] = {}
        is_method = next(iter(signature.parameters), None) == "self"
        metadata = {
            f"arg_{i}": _self(value) if is_method and i == 0 else encode(f"arg_{i}", value, tensors)
            for i, value in enumerate(args)
        }
        metadata.update({f"kwarg_{name}": encode(f"kwarg_{name}", value, tensors) for name, value in kwargs.items()})
        with self._lock:
            if not self._admits(_bytes(tensors)):
                return None
            self.calls[label] += 1
            sequence = self.calls[label]
        now = datetime.datetime.now()
        stamp = f"{now:%Y%m%d_%H%M%S}_{now.microsecond // 1000:03d}"
        safe_label = re.sub(r"[^\w.]", "_", label)
        name = f"{stamp}_pid{os.getpid()}_{safe_label}_call{sequence:04d}"
        record: Record = {
            "function_name": label,
            "qualname": func.__qualname__,
            "module": func.__module__,
            "call_sequence": sequence,
            "timestamp": now.isoformat(),
            "process_id": os.getpid(),
            "input_metadata": metadata,
            "output_metadata": {},
            "tensor_format": "torch",
            "function_signature": str(signature),
            "versions": _versions(),
        }
        if is_method and args:
            record["self_id"] = id(args[0])
        call = DumpedCall(self, name, record, is_graph_capturing())
        call.inputs(tensors)
        return call

    def _admits(self, size: int) -> bool:
        if sum(self.calls.values()) < self.max_count and self.written_bytes + size <= self.max_bytes:
            return True
        if not self._refused:
            self._refused = True
            self.logger.warning(
                "calls are no longer dumped: %d calls, %d bytes in %s; see FI_DUMP_MAX_COUNT and FI_DUMP_MAX_SIZE_GB",
                sum(self.calls.values()),
                self.written_bytes,
                self.root,
            )
        return False

    def write(self, parent: Path, name: str, kind: str, tensors: dict[str, torch.Tensor], record: Record) -> None:
        """Write one half of a call, and its record, below `parent`."""
        import torch

        directory = parent / name
        directory.mkdir(parents=True, exist_ok=True)
        # Copied, since saving a view would save everything it looks into; replay gives the strides back.
        host = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        torch.save(host, directory / f"{kind}.pt")
        line = json.dumps({**record, "dump_dir": str(directory)}) + "\n"
        with self._lock:
            self.written_bytes += _bytes(tensors)
            for path in (directory / "metadata.jsonl", parent / "session.jsonl"):
                with path.open("a", encoding="utf-8") as file:
                    file.write(line)

    def flush_graph_dumps(self) -> Path | None:
        """Write what the captured calls hold now, after a replay of their graph; returns the directory."""
        if not self.captured or not self._admits(sum(_bytes(tensors) for _, _, tensors, _ in self.captured)):
            return None
        self._flushes += 1
        parent = self.root / "graph_flushes" / f"flush_{self._flushes:04d}"
        for name, kind, tensors, record in self.captured:
            self.write(parent, name, kind, tensors, record)
        return parent

    def clear_graph_dumps(self) -> None:
        """Forget the captured calls and free their copies."""
        self.captured.clear()


def _versions() -> dict[str, str]:
    return {
        "fi_core": getattr(sys.modules["fi_core"], "__version__", "unknown"),
        "torch": str(sys.modules["torch"].__version__),
        "python": platform.python_version(),
    }
