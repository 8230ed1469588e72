"""`bench_gpu_time`: times a callable on the GPU by CUPTI, CUDA graph or events, and on the CPU by wall clock."""

from __future__ import annotations

import gc
import inspect
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fi_core.testing import l2
from fi_core.testing.cupti import CuptiRecorder, CuptiUnavailableError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Self

Run = Callable[[], object]


class BenchTimes(tuple[float, float]):
    """Times of a callable in ms: a tuple (median, std) that numpy converts to the array of all samples.

    Both `median, std = bench_gpu_time(...)` and `np.median(...)`, `np.std(...)`, `np.percentile(...)` of the result
    work. Everything except numpy sees the pair: `len`, indexing, iteration, `statistics.*`, `torch.tensor`.

    Args:
        samples: milliseconds of each call; also the attribute `samples`.
    """

    samples: list[float]

    def __new__(cls, samples: Sequence[float]) -> Self:
        self = super().__new__(cls, (statistics.median(samples), statistics.pstdev(samples)))
        self.samples = list(samples)
        return self

    # numpy.std(x) calls x.std() if x has that attribute, so the names are longer.
    @property
    def median_ms(self) -> float:
        return self[0]

    @property
    def std_ms(self) -> float:
        """The population standard deviation, numpy's default."""
        return self[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        import numpy as np

        return np.array(self.samples, dtype=dtype)

    def __getnewargs__(self) -> tuple[list[float]]:
        return (self.samples,)

    def __repr__(self) -> str:
        return f"BenchTimes(median={self[0]:.6g} ms, std={self[1]:.3g} ms, n={len(self.samples)})"


def bench_gpu_time(
    fn: Callable[..., object],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: bool | None = None,
    l2_flush_size_mb: int | None = None,
    l2_flush_device: Any = None,
    sleep_after_run: bool = False,
    enable_cupti: bool = False,
    use_cuda_graph: bool = False,
    num_iters_within_graph: int = 10,
    input_args: Sequence[Any] = (),
    input_kwargs: Mapping[str, Any] | None = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[[Any], float] = max,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    num_iters: int | None = None,
    rotate_buffers: bool | None = None,
) -> BenchTimes:
    """Times `fn(*input_args, **input_kwargs)`.

    The timer is CUPTI if enable_cupti, else a CUDA graph if use_cuda_graph, else CUDA events. If all tensor arguments
    are on the CPU, or there is no GPU, it is the wall clock.

    Args:
        fn: the callable.
        dry_run_iters: warm-up calls; computed from dry_run_time_ms if None.
        repeat_iters: timed calls; computed from repeat_time_ms if None.
        dry_run_time_ms: time for warm-up calls.
        repeat_time_ms: time for timed calls.
        l2_flush: deprecated, use cold_l2_cache.
        l2_flush_size_mb: deprecated, MiB to flush.
        l2_flush_device: deprecated, device of the flush.
        sleep_after_run: whether to sleep after each timed call, so that the GPU cools down.
        enable_cupti: whether to time by CUPTI. Without a usable CUPTI it warns and uses a graph or events.
        use_cuda_graph: whether to time the replay of a CUDA graph of several calls.
        num_iters_within_graph: the least number of calls in the graph.
        input_args: positional arguments of fn.
        input_kwargs: keyword arguments of fn.
        cold_l2_cache: whether each call finds a cold L2 cache. CUPTI and events flush the cache before each call,
            outside the timed part. A graph rotates over copies of the tensor arguments, so pass tensors as arguments
            and not in a closure.
        aggregate_op: reduces a time over the ranks of torch.distributed.
        args: another name of input_args.
        kwargs: another name of input_kwargs.
        num_iters: another name of repeat_iters.
        rotate_buffers: another name of cold_l2_cache.

    Returns:
        A `BenchTimes`.

    Raises:
        TypeError: An argument is given under both names.
        ValueError: An iteration count is too small, or CUPTI records other kernels in different calls.
    """
    if l2_flush is not None or l2_flush_size_mb is not None or l2_flush_device is not None:
        warnings.warn("l2_flush* are deprecated: use cold_l2_cache", DeprecationWarning, stacklevel=2)
    cold = _either("cold_l2_cache", cold_l2_cache if l2_flush is None else l2_flush, rotate_buffers)
    call = _Call(
        fn,
        tuple(_either("input_args", input_args, args)),
        dict(_either("input_kwargs", input_kwargs or {}, kwargs)),
    )
    plan = _Plan(
        dry_run_iters=dry_run_iters,
        repeat_iters=_either("repeat_iters", repeat_iters, num_iters),
        dry_run_time_ms=dry_run_time_ms,
        repeat_time_ms=repeat_time_ms,
        sleep_after_run=sleep_after_run,
        aggregate_op=aggregate_op,
    )
    if not call.on_gpu():
        return plan.measure(call, _wall_times)
    flush = l2.make_flush(l2_flush_device, l2_flush_size_mb << 20 if l2_flush_size_mb else None) if cold else None
    if enable_cupti:
        try:
            with CuptiRecorder() as recorder:
                run = _replay_of(call) if use_cuda_graph else call
                return plan.measure(run, lambda f, n: _cupti_times(recorder, f, n, flush))
        except CuptiUnavailableError as error:
            way = "a CUDA graph" if use_cuda_graph else "CUDA events"
            warnings.warn(f"{error} Falling back to {way} for benchmarking.", UserWarning, stacklevel=2)
    if use_cuda_graph:
        calls = _rotated(call, num_iters_within_graph) if cold else [call] * num_iters_within_graph
        graph = capture_graph(calls)
        return plan.measure(graph.replay, lambda f, n: [t / len(calls) for t in _event_times(f, n, None)])
    return plan.measure(call, lambda f, n: _event_times(f, n, flush))


def _timer(name: str, doc: str, *order: str, **fixed: Any) -> Callable[..., BenchTimes]:
    """`bench_gpu_time` with a timer, and the parameters of FlashInfer's function for it: `order`, then the rest."""
    usual = inspect.signature(bench_gpu_time)
    names = list(dict.fromkeys(("fn", *order, *usual.parameters)))
    signature = usual.replace(parameters=[usual.parameters[name] for name in names if name not in fixed])

    def timed(*args: Any, **kwargs: Any) -> BenchTimes:
        return bench_gpu_time(**signature.bind(*args, **kwargs).arguments, **fixed)

    timed.__name__, timed.__qualname__, timed.__doc__ = name, name, doc
    timed.__signature__ = signature  # type: ignore[attr-defined]
    return timed


_COUNTS = ("dry_run_iters", "repeat_iters", "dry_run_time_ms", "repeat_time_ms")
bench_gpu_time_with_cupti = _timer(
    "bench_gpu_time_with_cupti",
    "Times fn by CUPTI: `bench_gpu_time` with enable_cupti=True.",
    enable_cupti=True,
    num_iters_within_graph=10,
)
bench_gpu_time_with_cuda_event = _timer(
    "bench_gpu_time_with_cuda_event",
    "Times fn by CUDA events around each call: `bench_gpu_time` without CUPTI and graph.",
    enable_cupti=False,
    use_cuda_graph=False,
    num_iters_within_graph=10,
)
bench_gpu_time_with_cudagraph = _timer(
    "bench_gpu_time_with_cudagraph",
    "Times several calls of fn in one CUDA graph: `bench_gpu_time` with use_cuda_graph=True.",
    *_COUNTS,
    "num_iters_within_graph",
    enable_cupti=False,
    use_cuda_graph=True,
)


def bench_cpu_time(fn: Callable[..., object], *args: Any, **kwargs: Any) -> BenchTimes:
    """Times fn(*args, **kwargs) by wall clock, for a callable whose arguments do not tell that it runs on the CPU."""
    return _Plan().measure(_Call(fn, args, kwargs), _wall_times)


def capture_graph(calls: Sequence[Run], warmup: int = 3) -> torch.cuda.CUDAGraph:
    """Captures all calls, in order, in one CUDA graph, after warm-up calls on a side stream."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in [calls[0]] * warmup + list(calls[1:]):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with _no_garbage_collection(), torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.calls = calls  # type: ignore[attr-defined]  # the graph itself knows only the addresses of their tensors
    return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disables garbage collection: a finalizer that unloads a module or frees memory would end a graph capture."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Call:
    """fn with its arguments."""

    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs

    def __call__(self) -> object:
        return self.fn(*self.args, **self.kwargs)

    def copy(self) -> _Call:
        args, kwargs = l2.clone_tree((self.args, self.kwargs))
        return _Call(self.fn, args, kwargs)

    def on_gpu(self) -> bool:
        import torch

        devices = {t.device.type for t in l2.tensors_in((self.args, self.kwargs))}
        return torch.cuda.is_available() and devices != {"cpu"}


class _Plan:
    """The number of warm-up and timed calls, and the sleep between them; all timers share it."""

    def __init__(
        self,
        dry_run_iters: int | None = None,
        repeat_iters: int | None = None,
        dry_run_time_ms: float = 25,
        repeat_time_ms: float = 100,
        sleep_after_run: bool = False,
        aggregate_op: Callable[[Any], float] = max,
    ) -> None:
        for name, value, least in (("dry_run_iters", dry_run_iters, 0), ("repeat_iters", repeat_iters, 1)):
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.dry_run_iters, self.repeat_iters = dry_run_iters, repeat_iters
        self.dry_run_time_ms, self.repeat_time_ms = dry_run_time_ms, repeat_time_ms
        self.sleep_after_run, self.aggregate_op = sleep_after_run, aggregate_op

    def measure(self, run: Run, times: Callable[[Run, int], list[float]]) -> BenchTimes:
        from fi_core.testing.utils import aggregate_gpu_time_across_ranks, sleep_after_kernel_run

        run()
        estimate = statistics.mean(times(run, 5))
        [estimate] = aggregate_gpu_time_across_ranks([estimate], self.aggregate_op)  # all ranks agree on the counts
        warmup = self.dry_run_iters
        repeat = self.repeat_iters
        for _ in range(_count(self.dry_run_time_ms, estimate) if warmup is None else warmup):
            run()
        if repeat is None:
            repeat = _count(self.repeat_time_ms, estimate)
        if not self.sleep_after_run:
            samples = times(run, repeat)
        else:
            samples = []
            for _ in range(repeat):
                samples += times(run, 1)
                sleep_after_kernel_run(estimate)
        return BenchTimes(aggregate_gpu_time_across_ranks(samples, self.aggregate_op))


def _count(budget_ms: float, estimate_ms: float) -> int:
    return max(1, int(budget_ms / max(estimate_ms, 1e-6)))


def _either(name: str, value: Any, alias: Any) -> Any:
    """Returns the value, or its alias if given; raises TypeError if both are given (a default counts as not given)."""
    if alias is None:
        return value
    if name in ("input_args", "input_kwargs", "repeat_iters") and value not in ((), {}, None):
        raise TypeError(f"{name} is given twice, once under another name; give it once")
    return alias


def _wall_times(run: Run, n: int) -> list[float]:
    samples = []
    for _ in range(n):
        start = time.perf_counter_ns()
        run()
        samples.append((time.perf_counter_ns() - start) / 1e6)
    return samples


def _event_times(run: Run, n: int, flush: Run | None) -> list[float]:
    import torch

    pairs = []
    for _ in range(n):
        if flush is not None:
            flush()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _cupti_times(recorder: CuptiRecorder, run: Run, n: int, flush: Run | None) -> list[float]:
    windows = [recorder.window(run, flush) for _ in range(n)]
    if len({w.names for w in windows}) > 1:
        a, b = sorted({w.names for w in windows})[:2]
        raise ValueError(f"Inconsistent kernel names between iterations: {list(a)} and {list(b)}")
    return [w.span_ns / 1e6 for w in windows]


def _replay_of(call: _Call) -> Run:
    return capture_graph([call]).replay


def _rotated(call: _Call, at_least: int) -> list[Run]:
    """Returns calls on copies of the tensors; the bytes of all copies exceed the L2 cache several times."""
    tensors = [t for t in l2.tensors_in((call.args, call.kwargs)) if t.is_cuda]
    if not tensors:
        warnings.warn(
            "cold_l2_cache: no tensor in input_args or input_kwargs, so the CUDA graph measures a warm cache",
            UserWarning,
            stacklevel=3,
        )
        return [call] * at_least
    rotations = l2.calculate_rotation_count(tensors, tensors[0].device)
    copies = [call, *(call.copy() for _ in range(rotations - 1))]
    return [copies[i % rotations] for i in range(max(at_least, rotations))]
