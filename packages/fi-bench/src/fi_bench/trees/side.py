"""One checkout's side of `compare-trees`: a process that prepares cases and times one turn of each when it is told to.

The file runs as a script with the package folders of the measured checkout. Of that checkout it uses the public
functions of fi_core and, of fi_bench, `parsing.parse`, `cases.find` and the fields function, make, plan, call, outputs,
poison and work of a case. The timed loops are those of the checkout that compares.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import itertools
import json
import operator
import os
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_TURN_NS, _LEAST_SAMPLES, _MOST_SAMPLES = 15e6, 3, 200  # of one metric in one turn
_LONG_CALL_NS, _CALLS_OF_LONG = 1e6, 3  # a graph of long calls needs few
_MOST_HOST_BATCHES = 5
_CYCLES_PER_NS = 3.0  # above the clock of every GPU


def _load_loops() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "measure" / "loops.py"
    spec = importlib.util.spec_from_file_location("compared_loops", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


loops = _load_loops()


class Planned:
    """A wrapper of fi_core that keeps the arguments of its plan, so that the plan can be timed."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.again: Callable[[], Any] = wrapper.plan

        @functools.wraps(wrapper.plan)  # cases look at its parameters
        def plan(*args: Any, **kwargs: Any) -> Any:
            self.again = functools.partial(wrapper.plan, *args, **kwargs)
            return self.again()

        self.plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapper, name)


class Turns:
    """One prepared case: `turn` times each metric once."""

    def __init__(self, words: list[str], device_name: str) -> None:
        import torch

        from fi_bench import case, cases, parsing

        args = parsing.parse(words)
        older: Any = case  # has `find` in a checkout whose `cases` does not
        find = getattr(cases, "find", None) or older.find
        found = find(args.routine)
        if found is None:
            raise LookupError(f"this checkout has no case of {args.routine}")
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if device_name == "cuda" else torch.device("cpu")
        )
        torch.manual_seed(args.random_seed)
        self.inputs = found.make(args, self.device, torch.Generator(self.device).manual_seed(args.random_seed))
        self.input_sum = _checksum({k: v for k, v in self.inputs.items() if k not in found.poison}, sample=True)
        module, _, attribute = found.function.rpartition(".")
        function = operator.attrgetter(attribute)(importlib.import_module(f"fi_core.{module}"))
        self.plan: Callable[[], Any] | None = None
        self.call = functools.partial(found.call, function)
        if found.plan is not None:
            make = functools.wraps(function)(lambda *a, **k: Planned(function(*a, **k)))
            planned = found.plan(make, self.inputs, "auto")
            self.plan = planned.again
            self.call = functools.partial(found.call, planned.wrapper)
        torch.manual_seed(args.random_seed)  # for functions that draw without a seed
        returned = self.call(self.inputs)
        self.output_sum = _checksum((returned, found.outputs(self.inputs, returned)))
        work = found.work(args, self.inputs)
        self.bytes = int(work.bytes)
        self.metrics = self._metrics()

    def _metrics(self) -> dict[str, Callable[[], float]]:
        run = functools.partial(self.call, self.inputs)
        metrics: dict[str, Callable[[], float]] = {}
        if self.device.type == "cuda":
            once = self._once(run)
            rotation = loops.rotation(self.inputs, self.bytes, self.device)
            least = _CALLS_OF_LONG if once > _LONG_CALL_NS else loops.LEAST_CALLS_IN_GRAPH
            calls = loops.calls_of(self.call, rotation.copies, least)
            replay, wait_cycles = self._walk(calls)
            self.kept = replay, rotation  # the graph refers to them
            count = max(_LEAST_SAMPLES, min(_MOST_SAMPLES, int(_TURN_NS / max(once * len(calls), 1))))
            metrics["device"] = lambda: statistics.median(loops.replay_ns(replay, count, wait_cycles)) / len(calls)
            queue_ns = max(once * loops.HOST_CALLS_IN_QUEUE, 1)
            batches = max(1, min(_MOST_HOST_BATCHES, int(_TURN_NS / queue_ns)))
            metrics["host run"] = lambda: self._host(run, batches)
        else:
            endless = itertools.repeat(self.inputs)
            once = loops.wall_ns(self.call, endless, 1)
            repeats = max(1, int(loops.SHORTEST_SAMPLE_NS / max(once, 1)))
            count = max(_LEAST_SAMPLES, min(_MOST_SAMPLES, int(_TURN_NS / max(once * repeats, 1))))
            metrics["cpu"] = lambda: statistics.median(loops.wall_ns(self.call, endless, repeats) for _ in range(count))
        if self.plan is not None:
            plan = self.plan
            metrics["host plan"] = lambda: self._host(plan)
        return metrics

    def _walk(self, calls: list[Callable[[], object]]) -> tuple[Callable[[], object], int]:
        """All calls as one graph; where they cannot be captured, one after another behind a wait of these cycles."""
        import torch

        def eager() -> None:
            for call in calls:
                call()

        try:
            return loops.walk(calls), 0
        except (RuntimeError, ValueError):
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        eager()
        return eager, int(_CYCLES_PER_NS * (time.perf_counter_ns() - start))

    def _once(self, run: Callable[[], object]) -> float:
        """Roughly the nanoseconds of one call."""
        import torch

        for _ in range(3):
            run()
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - start) / 5

    def _host(self, run: Callable[[], object], batches: int = _MOST_HOST_BATCHES) -> float:
        """The least of several batches: other load on the host only adds time."""
        found = []
        for _ in range(batches):
            self._wait()
            found.append(loops.queued_ns(run))
        self._wait()
        return float(min(found))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def turn(self) -> dict[str, float]:
        return {name: measure() for name, measure in self.metrics.items()}


def _tensors(tree: Any) -> Iterator[Any]:
    from fi_core.testing import l2

    return l2.tensors_in(tree)


def _checksum(tree: Any, sample: bool = False) -> str:
    """Of the bits of all tensors, or of a sample of each; equal sums mean equal results."""
    import ctypes

    total, seen = 0, set()
    for tensor in _tensors(tree):
        place = tensor.data_ptr(), tensor.shape, tensor.stride()
        if place in seen:  # a result that is returned and written to an input
            continue
        seen.add(place)
        flat = tensor.detach().reshape(-1)
        if sample:
            flat = flat[:: max(flat.numel() // 4096, 1)]
        flat = flat.cpu().contiguous()
        total = zlib.crc32(ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b"", total)
    return f"{total:08x}"


def _hello() -> dict[str, Any]:
    """What this side measures."""
    import torch

    import fi_bench
    import fi_core

    return {
        "fi_core": str(Path(str(fi_core.__file__)).parent),
        "fi_bench": str(Path(str(fi_bench.__file__)).parent),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _lost(device: str) -> bool:
    """After an illegal access every CUDA call of the process fails."""
    import torch

    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def serve(answer: Callable[[dict[str, Any]], None]) -> None:
    """Tasks come as JSON lines on stdin; each gets one answer."""
    current: Turns | None = None
    for line in iter(sys.stdin.readline, ""):
        task = json.loads(line)
        try:
            if task["do"] == "hello":
                answer(_hello())
            elif task["do"] == "turn":
                assert current is not None
                answer({"ns": current.turn()})
            else:
                current = None
                _free()
                if task["do"] == "prepare":
                    current = Turns(task["words"], task["device"])
                    answer({"inputs": current.input_sum, "outputs": current.output_sum, "bytes": current.bytes})
                else:
                    answer({})
        except Exception as error:
            current = None
            where = traceback.format_exc(limit=-3)
            answer({"error": f"{type(error).__name__}: {error}", "where": where, "lost": _lost(task.get("device", ""))})


def _free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    answers_to, *packages = sys.argv[1:]
    sys.path[:1] = packages  # instead of the folder of this script
    with os.fdopen(int(answers_to), "w", encoding="utf-8") as answers:

        def answer(found: dict[str, Any]) -> None:
            answers.write(json.dumps(found) + "\n")
            answers.flush()

        serve(answer)


if __name__ == "__main__":
    main()
