"""GPU timers: CUPTI, CUDA graph with events, events behind a held stream. Clocks are watched in all three."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from fi_bench.case import Inputs
from fi_bench.measure import loops, nvml
from fi_bench.measure.device import HOLD_LIMIT_NS, DriverError, Kernels, kernels, megahertz
from fi_bench.measure.samples import Cache, Call, Measurement, Options, collect, rotation
from fi_bench.measure.wall import host_cost_ns
from fi_core.testing import l2
from fi_core.testing.cupti import CuptiRecorder, CuptiUnavailableError, Window

if TYPE_CHECKING:
    import torch

Run = Callable[[], object]
FALLBACK = "Falling back to CUDA events."  # FlashInfer's words
_STEADY, _STEADY_CHECKS, _STEADY_SECONDS, _CHECK_NS = 0.98, 3, 1.0, 3e6
_SLOW_CLOCK = 0.75  # of the fastest sample; a slower one is retaken
_SUSTAINED_NS, _SUSTAINED_SECONDS = 1e6, 0.3  # longer calls are measured under steady load, after this time of it
_REST, _LONGEST_REST = 4, 0.02  # burst: idle time after a sample in samples, and in seconds
# Below these medians, overhead is more than some percent of an event timer's result: on an H200 2.3 us for
# events, up to 0.1 us for a graph of calls.
_SHORT_NS = {"graph_events": 10_000, "events": 100_000}


def measure_gpu(call: Call, inputs: Inputs, work_bytes: int, device: torch.device, options: Options) -> Measurement:
    """Measures with the best timer that works here; the result gives the reasons against better ones."""
    before = nvml.state(device)
    session = Session(call, inputs, work_bytes, device, options)
    found = session.measure()
    found.host_ns = host_cost_ns(lambda: call(inputs))
    after = nvml.state(device)
    found.clocks = {"before": before, "after": after} if after else {}
    slowed = nvml.slowdowns(before) | nvml.slowdowns(after)
    if slowed:
        found.warnings.append(f"the GPU was held back: {', '.join(sorted(slowed))}")
    below = _SHORT_NS.get(found.timer, 0)
    if statistics.median(found.samples_ns) < below:
        gaps = f"below {below // 1000} us gaps before and after a call count in the {found.timer} timer"
        found.warnings.append(f"{gaps}, some 2 us for each pair of events; CUPTI leaves them out")
    return found


class Session:
    """One measurement: its inputs, its clock samples and its warnings."""

    def __init__(self, call: Call, inputs: Inputs, work_bytes: int, device: torch.device, options: Options) -> None:
        self.call, self.inputs, self.work_bytes = call, inputs, work_bytes
        self.device, self.options = device, options
        self.cold = options.cache == "cold"
        self.mhz: list[float] = []  # per sample, as is busy
        self.busy: list[float] = []  # CUPTI: without gaps
        self.discarded = 0
        self.burst = options.regime == "burst"
        self.warnings: list[str] = []
        self.kernels = self._load_kernels()

    def _load_kernels(self) -> Kernels | None:
        try:
            return kernels(self.device)
        except (DriverError, OSError, RuntimeError) as error:
            self.warnings.append(f"no SM clock and no held stream: {str(error).splitlines()[0]}")
            return None

    def measure(self) -> Measurement:
        reasons = []
        if not self.options.cupti:
            reasons.append("CUDA events were asked for")
        else:
            try:
                return self._by_cupti()
            except CuptiUnavailableError as error:
                reasons.append(str(error))
                self.warnings.append(f"{error} {FALLBACK}")
        if not self.options.graph:
            reasons.append("no CUDA graph was asked for")
        else:
            graph = self._captured_walk()
            if graph is not None:
                return self._by_graph(*graph, reason="; ".join(reasons))
        return self._by_events("; ".join(reasons))

    # --- timers ---

    def _by_cupti(self) -> Measurement:
        eager: Run = functools.partial(self.call, self.inputs)
        flush, cache = self._flush()
        last: list[Window] = []
        with CuptiRecorder() as recorder:  # before the capture, so that CUPTI knows the graph
            run = (self._captured(lambda: loops.walk([eager])) if self.options.graph else None) or eager
            warmup = self._warm_up(run)

            def take(n: int) -> list[float]:
                import torch

                marks = torch.zeros(n, 2, 2, dtype=torch.int64, device=self.device)
                taken = []
                for begin, end in marks:
                    taken.append(recorder.window(run, functools.partial(self._mark_and_flush, begin, flush)))
                    self._mark(end)
                    self.rest(taken[-1].span_ns)
                last[:] = taken
                self.busy += [float(w.sum_ns) for w in taken]
                if len({w.names for w in taken}) > 1:
                    self.warnings.append("the calls did not all launch the same kernels")
                return self._note(marks, [float(w.span_ns) for w in taken])

            samples = self.collected(take)
        found = self.measurement(samples, "cupti", cache, warmup)
        found.sum_ns = self.busy
        found.kernels = [
            {"name": a.name, "ns": a.end - a.start, "grid": a.grid, "registers": a.registers}
            for a in last[-1].activities
        ]
        return found

    def _by_graph(self, replay: Run, calls: int, cache: Cache, reason: str) -> Measurement:
        warmup = self._warm_up(replay, calls)

        def take(n: int) -> list[float]:
            return [ns / calls for ns in self._event_times(replay, n, None)]

        return self.measurement(self.collected(take), "graph_events", cache, warmup, reason)

    def _by_events(self, reason: str) -> Measurement:
        flush, cache = self._flush()
        run: Run = functools.partial(self.call, self.inputs)
        warmup = self._warm_up(run)
        samples = self.collected(lambda n: self._event_times(run, n, flush))
        return self.measurement(samples, "events", cache, warmup, reason)

    # --- parts ---

    def _event_times(self, run: Run, n: int, flush: Run | None) -> list[float]:
        """Event pairs around each run. While the stream is held the host enqueues, so that no launch gap is timed."""
        import torch

        marks = torch.zeros(n, 2, 2, dtype=torch.int64, device=self.device)
        pairs = []
        hold = self.kernels is not None
        self.burst &= hold  # after a rest, the times would include launch gaps
        for begin, finish in marks:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._mark(begin)
            enqueued = time.perf_counter_ns()
            if hold and self.kernels is not None:
                self.kernels.hold()
            if flush is not None:
                flush()
            start.record()
            run()
            end.record()
            if hold and self.kernels is not None:
                self.kernels.release()
                if time.perf_counter_ns() - enqueued > HOLD_LIMIT_NS:
                    hold = False
                    self.warnings.append("the call waits for the GPU: its launch gaps are inside the times")
            self._mark(finish)
            if self.burst:
                end.synchronize()
                self.rest(start.elapsed_time(end) * 1e6)
            pairs.append((start, end))
        torch.cuda.synchronize()
        return self._note(marks, [start.elapsed_time(end) * 1e6 for start, end in pairs])

    def rest(self, busy_ns: float) -> None:
        if self.burst:
            time.sleep(min(_REST * busy_ns / 1e9, _LONGEST_REST))

    def _captured_walk(self) -> tuple[Run, int, Cache] | None:
        copies, cache = self._copies()
        calls = loops.calls_of(self.call, copies)
        replay = self._captured(lambda: loops.walk(calls))
        return None if replay is None else (replay, len(calls), cache)

    def _captured(self, capture: Callable[[], Run]) -> Run | None:
        import torch

        try:
            with warnings.catch_warnings():  # which torch gives on top of the error of a first call that failed
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                return capture()
        except (RuntimeError, ValueError) as error:
            torch.cuda.synchronize()
            self.warnings.append(f"no CUDA graph: {str(error).splitlines()[0]}")
            return None

    def _copies(self) -> tuple[list[Inputs], Cache]:
        if not self.cold:
            return [self.inputs], self._warm()
        copies, cache = rotation(self.inputs, self.work_bytes, self.device)
        if not cache.verified:
            self.warnings.append(
                f"cache is cold?: {cache.copies} copies touch {cache.footprint_bytes} bytes, "
                f"twice the L2 is {2 * cache.cache_bytes}"
            )
        return copies, cache

    def _warm(self) -> Cache:
        size, touched = l2.get_l2_cache_size(self.device), l2.touched_bytes(self.inputs)
        if touched > size:
            self.warnings.append(f"cache is warm?: the inputs ({touched} bytes) do not fit in the L2 ({size})")
        return Cache("warm", "none", touched <= size, 1, touched, size)

    def _flush(self) -> tuple[Run | None, Cache]:
        if not self.cold:
            return None, self._warm()
        size = l2.get_l2_cache_size(self.device)
        how = self.options.flush
        flush = l2.make_flush(self.device, 2 * size, "read" if how == "read" else "write")
        return flush, Cache("cold", f"flush-{how}", True, 1, 2 * size, size)

    def _warm_up(self, run: Run, calls: int = 1) -> int:
        """At least the asked calls, and on until the SM clock stays near its best or a second is over. Chooses the
        regime; `calls` are in one run.
        """
        import torch

        run()  # the first call may load and allocate
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        count = max(self.options.dry_run_iters, 1)
        for _ in range(count):
            run()
        torch.cuda.synchronize()
        per_run = (time.perf_counter_ns() - started) / count
        if self.options.regime == "auto":
            self.burst = per_run / calls < _SUSTAINED_NS
        batch = max(1, min(1000, int(_CHECK_NS / per_run)))
        best, steady, now = 0.0, 0, time.monotonic()
        end, least = now + _STEADY_SECONDS, now + (0.0 if self.burst else _SUSTAINED_SECONDS)
        marks = torch.zeros(2, 2, dtype=torch.int64, device=self.device)
        while (steady < _STEADY_CHECKS or time.monotonic() < least) and time.monotonic() < end:
            self._mark(marks[0])
            for _ in range(batch):
                run()
            self._mark(marks[1])
            torch.cuda.synchronize()
            count += batch
            mhz = megahertz(*marks.tolist())
            best = max(best, mhz)
            steady = steady + 1 if self.kernels is None or mhz >= _STEADY * best else 0
        if steady < _STEADY_CHECKS:
            self.warnings.append("the SM clock was not steady after a second of warm-up")
        return count * calls

    def _mark(self, slot: torch.Tensor) -> None:
        if self.kernels is not None:
            self.kernels.mark(slot)

    def _mark_and_flush(self, slot: torch.Tensor, flush: Run | None) -> None:
        self._mark(slot)
        if flush is not None:
            flush()

    def _note(self, marks: torch.Tensor, samples: list[float]) -> list[float]:
        """The samples, with their clocks kept."""
        self.mhz += [megahertz(*pair) for pair in marks.tolist()]
        return samples

    def collected(self, take: Callable[[int], list[float]]) -> list[float]:
        """Retakes samples at a slow clock once; samples that stay slow cause a warning."""
        samples = collect(take, self.options.num_iters, time.monotonic)
        slow, n = self._slow(), len(samples)
        if slow:
            samples += take(len(slow))
            for track in (samples, self.mhz, self.busy):
                for i, again in zip(slow, track[n:], strict=False):
                    track[i] = again
                del track[n:]
            self.discarded = len(slow)
            if self._slow():
                self.warnings.append(f"{len(self._slow())} samples ran below {_SLOW_CLOCK:.0%} of the best SM clock")
        return samples

    def _slow(self) -> list[int]:
        best = max(self.mhz, default=0.0)
        return [i for i, mhz in enumerate(self.mhz) if 0 < mhz < _SLOW_CLOCK * best]

    def measurement(self, samples: list[float], timer: str, cache: Cache, warmup: int, reason: str = "") -> Measurement:
        watched = [mhz for mhz in self.mhz if mhz > 0]
        return Measurement(
            samples,
            timer,
            cache,
            reason,
            "burst" if self.burst else "sustained",
            warmup,
            self.discarded,
            sm_mhz=watched,
            warnings=self.warnings,
        )
