"""Level 10 of the API log: each call's inputs and outputs as files, from which `replay` runs it again.

A call is a directory with inputs.pt, outputs.pt and metadata.jsonl; the last record counts. A record that stays at
"inputs_saved" belongs to a call that did not return. Calls inside a dumped call are logged but not dumped: a replay of
the outer call makes them. While a CUDA graph is captured nothing can be read back, so copies become part of the graph,
and `flush_graph_dumps` writes their contents after a replay.

Directories have mode 0700 and files 0600, whatever the umask. A workspace (a parameter with that word in its name) is
described, its content is not saved. Source code of an attention variant is saved, but no replay compiles it.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fi_core.observe.encode import Record, details, encode, encode_result, encode_self
from fi_core.runtime import files
from fi_core.runtime.env import env
from fi_core.utils import is_graph_capturing

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _on_host(tensors: Tensors) -> Tensors:
    """Compact copies: to save a view would save everything that it looks into; replay restores the strides."""
    import torch

    with torch.no_grad():
        return {key: x.detach().resolve_conj().resolve_neg().to("cpu", copy=True) for key, x in tensors.items()}


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two host tensors of one shape and dtype hold the same bits; NaN equals itself."""
    import torch

    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


@dataclass
class DumpedCall:
    """One call: its record as far as it is known, and where it is written."""

    dumper: Dumper
    name: str
    record: Record
    captured: bool
    given: Tensors = field(default_factory=dict)  # the inputs, live
    before: Tensors = field(default_factory=dict)  # the inputs as they were, on the host

    def inputs(self, tensors: Tensors) -> None:
        self.given = tensors
        self.record["tensor_info"] = {"input_tensors": list(tensors), "output_tensors": []}
        self.record["tensor_details"] = {key: details(tensor) for key, tensor in tensors.items()}
        if not self.captured:
            self.before = _on_host(tensors)
        self._save("inputs", self.before if self.before else tensors, "inputs_saved")

    def outputs(self, result: Any) -> None:
        """Save the result of the call and the inputs that it wrote (not while a graph is captured)."""
        tensors: Tensors = {}
        self.record["output_metadata"] = encode_result(result, tensors)
        host = {} if self.captured else _on_host(tensors)
        returned = {id(tensor) for tensor in tensors.values()}
        for key, tensor in self.given.items():
            if self.captured or id(tensor) in returned:
                continue
            ((_, after),) = _on_host({key: tensor}).items()
            if not _same_bytes(self.before[key], after):
                tensors[key] = tensor
                host[key] = after
        self.given = self.before = {}
        self.record["tensor_info"]["output_tensors"] = list(tensors)
        self.record["tensor_details"].update({key: details(tensor) for key, tensor in tensors.items()})
        if not self.captured and not self.dumper.admits(_bytes(tensors)):
            self.record["outputs_saved"] = False
            tensors, host = {}, {}
        self._save("outputs", tensors if self.captured else host, "completed")

    def _save(self, kind: str, tensors: Tensors, status: str) -> None:
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
    captured: list[tuple[str, str, Tensors, Record]] = field(default_factory=list)
    written_bytes: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    _flushes: int = 0
    _refused: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.local = field(default_factory=threading.local)

    @classmethod
    def from_env(cls, logger: logging.Logger) -> Dumper:
        return cls(env.dump_dir, env.dump_max_size_gb * 1e9, env.dump_max_count, logger)

    def enter(self) -> bool:
        """Begin a call; whether it is the outermost one of its thread, which alone is dumped."""
        depth: int = getattr(self._thread, "depth", 0)
        self._thread.depth = depth + 1
        return depth == 0

    def leave(self) -> None:
        """End the call that `enter` began."""
        self._thread.depth -= 1

    def inputs(
        self,
        target: str,
        label: str,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> DumpedCall | None:
        """Save the inputs of a call; None if a limit forbids it. target: the name in the registry of the API."""
        tensors: Tensors = {}
        names = list(signature.parameters)
        is_method = names[:1] == ["self"]
        metadata: Record = {}
        for key, name, value in (
            *((f"arg_{i}", names[i] if i < len(names) else "", value) for i, value in enumerate(args)),
            *((f"kwarg_{name}", name, value) for name, value in kwargs.items()),
        ):
            if is_method and key == "arg_0":
                metadata[key] = encode_self(value)
            else:
                metadata[key] = encode(key, value, tensors, scratch="workspace" in name)
        captured = is_graph_capturing()
        generator = None
        if not captured and "generator" in names:
            generator = _default_generator(signature.bind(*args, **kwargs).arguments.get("generator"), tensors)
        with self._lock:
            if not self._has_room(0 if captured else _bytes(tensors), 1):
                return None
            self.calls[label] += 1
            sequence = self.calls[label]
        now = datetime.datetime.now()
        stamp = f"{now:%Y%m%d_%H%M%S}_{now.microsecond // 1000:03d}"
        safe_label = re.sub(r"[^\w.]", "_", label)[:100]
        name = f"{stamp}_pid{os.getpid()}_{safe_label}_call{sequence:04d}"
        module, _, qualname = target.partition(":")
        record: Record = {
            "function_name": label,
            "qualname": qualname,
            "module": module,
            "call_sequence": sequence,
            "timestamp": now.isoformat(),
            "process_id": os.getpid(),
            "input_metadata": metadata,
            "output_metadata": {},
            "tensor_format": "torch",
            "function_signature": str(signature),
            "versions": _versions(),
        }
        if generator is not None:
            record["default_generator"] = generator
        if is_method and args:
            record["self_id"] = id(args[0])
        call = DumpedCall(self, name, record, captured)
        call.inputs(tensors)
        return call

    def admits(self, size: int) -> bool:
        """Whether so many bytes more stay within the limit."""
        with self._lock:
            return self._has_room(size, 0)

    def _has_room(self, size: int, calls: int) -> bool:
        """Reserves the bytes; warns once if a limit is met."""
        if sum(self.calls.values()) + calls <= self.max_count and self.written_bytes + size <= self.max_bytes:
            self.written_bytes += size
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

    def write(self, parent: Path, name: str, kind: str, tensors: Tensors, record: Record) -> None:
        """Write one half of a call, and its record, below `parent`; `tensors` are compact."""
        import torch

        directory = parent / name
        files.make(directory)
        with files.opened(directory / f"{kind}.pt", "wb") as file:
            torch.save(tensors, file)
        line = json.dumps({**record, "dump_dir": str(directory)}) + "\n"
        with self._lock:
            for path in (directory / "metadata.jsonl", parent / "session.jsonl"):
                with files.opened(path, "a") as file:
                    file.write(line)

    def flush_graph_dumps(self) -> Path | None:
        """Write the current contents of the captured copies, after a replay of their graph; returns the directory."""
        if not self.captured or not self.admits(sum(_bytes(tensors) for _, _, tensors, _ in self.captured)):
            return None
        self._flushes += 1
        parent = self.root / "graph_flushes" / f"flush_{self._flushes:04d}"
        for name, kind, tensors, record in self.captured:
            self.write(parent, name, kind, _on_host(tensors), record)
        return parent

    def clear_graph_dumps(self) -> None:
        """Forget the captured calls and free their copies."""
        self.captured.clear()


def _default_generator(given: Any, tensors: Tensors) -> Record | None:
    """The state of the generator that a call draws from if it is given none: that of the device of its tensors."""
    import torch

    device = next((tensor.device for tensor in tensors.values()), None)
    if given is not None or device is None or device.type not in ("cpu", "cuda"):
        return None
    default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    return encode("default_generator", default, tensors)


def _versions() -> dict[str, str]:
    return {
        "fi_core": getattr(sys.modules["fi_core"], "__version__", "unknown"),
        "torch": str(sys.modules["torch"].__version__),
        "python": platform.python_version(),
    }
