"""One case in this process: inputs, check against the reference, timing, one record per backend."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fi_bench import backends, cases, environment, record, refcheck, stats
from fi_bench.case import Case, Inputs, Outputs, Work
from fi_bench.catalog import family_of
from fi_bench.console import Log, human_time, perf, say
from fi_bench.errors import ContextLostError, MismatchError, SkipError
from fi_bench.measure import FALLBACK, Measurement, Options, measure
from fi_bench.measure.ranks import count, gathered
from fi_core.runtime.errors import LibraryError, UnsupportedError

if TYPE_CHECKING:
    import torch

Record = record.Record


def asked_backends(args: Namespace) -> list[str]:
    """The --backends of a line. Default: FlashInfer's on a GPU, or `auto`; `cpu` without a GPU."""
    if args.backends:
        return list(dict.fromkeys(args.backends))
    import torch

    if args.device == "cpu" or not torch.cuda.is_available():
        return ["cpu"]
    return backends.usual(args.routine)


def device_of(args: Namespace, names: Iterable[str]) -> str:
    """The CPU if the backend `cpu` is timed, so that its peers run on it too; else the GPU if there is one."""
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise SkipError("--device cuda: torch sees no CUDA device")
    if args.device != "auto":
        return str(args.device)
    return "cuda" if torch.cuda.is_available() and "cpu" not in names else "cpu"


class CaseRun:
    """One case: its inputs, reference and environment, which all backends share."""

    def __init__(self, args: Namespace, run_id: str, trial: int, emit: Callable[[Record], None]) -> None:
        self.args, self.run_id, self.trial, self.emit = args, run_id, trial, emit
        self.log = Log(args.verbose)
        self.names = asked_backends(args)
        self.key = record.case_key(args.routine, args)
        self.params = record.parameters(args)
        self.repro = repro_command(args)
        self.case: Case | None = None
        self.device: torch.device | None = None
        self.inputs: Inputs | None = None
        self.reference: Outputs | None = None
        self.ran: dict[str, str] = {}  # by backend: the implementation that its first call chose

    def run(self) -> list[Record]:
        """Returns one record per backend.

        Raises MismatchError at the first mismatch that is not allowed, and ContextLostError when the CUDA context of
        this process is broken.
        """
        self.log.info(f"args = {self.args}")
        self.log.info(f"Running test{self.args.routine}")
        self.log.info(f"fi-core version: {environment.fi_core_version()}")
        if self.args.generate_repro_command:
            say("INFO", f"To reproduce this test case, run the following command: {self.repro}")
        records = []
        for name in self.names:
            found = self._one(name)
            records.append(found)
            self.emit(found)
            if found["status"] == "mismatch" and not self.args.allow_output_mismatch:
                raise MismatchError(f"[ERROR] Backend {name} output mismatch")
            if found["status"] == "failed" and self._context_is_lost():
                raise ContextLostError(found["reason"])
        if not any(r["status"] in ("ok", "mismatch") for r in records):
            say("ERROR", "No backends to test. Exiting.")
        return records

    def _context_is_lost(self) -> bool:
        """After an illegal access every CUDA call of the process fails."""
        if self.device is None or self.device.type != "cuda":
            return False
        import torch

        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def _one(self, typed: str) -> Record:
        found = self.blank(typed)
        try:
            name, renamed = backends.canonical(typed, family_of(self.args.routine).name)
            if renamed:
                say("WARNING", renamed)
            self._fill(name, found)
        except (SkipError, UnsupportedError, LibraryError) as skip:
            reason = " ".join(str(skip).split()).rstrip(".")
            found |= {"status": "skipped", "reason": reason}
            say(
                "WARNING", f"{typed} for routine {self.args.routine} is not supported on {_here()}: {reason}. Skipping."
            )
        except Exception as error:
            found |= {
                "status": "failed",
                "reason": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }
            say("ERROR", f"Error running {typed} on {self.args.routine}: {type(error).__name__}: {error}")
            if self.args.verbose >= 2:
                traceback.print_exc()
        return found

    def blank(self, name: str) -> Record:
        return {
            "schema_version": record.SCHEMA_VERSION,
            "record_id": record.record_id(self.run_id, self.key, name, self.trial),
            "run_id": self.run_id,
            "trial": self.trial,
            "pid": os.getpid(),
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "case_key": self.key,
            "routine": self.args.routine,
            "backend": name,
            "params": self.params,
            "args": {k: v for k, v in vars(self.args).items() if k not in self.params},
            "repro": self.repro,
        }

    def _fill(self, name: str, found: Record) -> None:
        found_case = cases.find(self.args.routine)
        if found_case is None:
            raise SkipError(f"fi-core has no {self.args.routine} yet")
        self.case = found_case
        device_name = device_of(self.args, self.names)
        runner = backends.bind(name, self.case, device_name)
        if name in backends.labels(self.case) and runner.library == "fi_core":
            say("INFO", f"{name} times fi_core.{self.case.function}; FlashInfer's own is flashinfer:{name}")
        why = self.case.unsupported(name, self.args) if self.case.unsupported else None
        if why:
            raise SkipError(why)
        if self.args.enable_pdl and not self.case.pdl:
            say(
                "WARNING",
                f"--enable_pdl provided but routine {self.case.routine} does not support PDL; flag is ignored.",
            )
        self._check_ranks(device_name)
        self._prepare(device_name)
        assert self.inputs is not None
        assert self.device is not None
        found |= {
            "env": environment_once(),
            "device": device_name,
            "library": runner.library,
            "resolved_backend": runner.resolved or name,
        }
        label = name
        on_gpu = device_name == "cuda"
        with runner.context(), marked(f"{self.args.routine} {name}", on_gpu):
            if self.args.refcheck:
                found["refcheck"] = self._check(runner)
                found["status"] = found["refcheck"]["status"]
                if found["status"] == "mismatch" and not self.args.allow_output_mismatch:
                    return
            work = self.case.work(self.args, self.inputs)
            inputs = fresh(self.inputs)
            call = runner.prepare(inputs)
            if not self.args.refcheck:
                self._call(runner, call, inputs)
            if ran := self.ran.get(name):
                found["resolved_backend"] = ran
                label = f"auto({ran})" if name == "auto" else name
            measured = measure(call, inputs, work.bytes, self.device, self._options())
            if self.args.refcheck:
                after = self._check_after(runner, inputs)
                found["refcheck"]["after"] = after["status"]
                if after["status"] == "mismatch":
                    found["refcheck"], found["status"] = {**after, "after": "mismatch"}, "mismatch"
                    if not self.args.allow_output_mismatch:
                        return
        found |= _measured(measured, work)
        found.setdefault("status", "ok")
        if self.case.lengths:
            found["lengths"] = dict(self.case.lengths(self.inputs))
        self._report(label, found)

    def _check_ranks(self, device_name: str) -> None:
        import torch

        asked = count(self.args)
        if device_name == "cuda" and asked > torch.cuda.device_count():
            raise SkipError(f"--ranks {asked} takes as many GPUs, this machine has {torch.cuda.device_count()}")

    def _prepare(self, device_name: str) -> None:
        if self.inputs is not None:
            return
        import torch

        assert self.case is not None
        device = torch.device(f"cuda:{torch.cuda.current_device()}" if device_name == "cuda" else "cpu")
        self.device = device
        self.inputs = self._drawn(self.args.random_seed)
        self.log.detail("gpu_name", repr(environment.gpu_name()) if device.type == "cuda" else "none: CPU")
        if self.case.lengths:
            for words, value in self.case.lengths(self.inputs).items():
                self.log.lengths(f"Average actual {words.replace('avg_actual_', '').replace('_', ' ')}: {int(value)}")
        for name, value in named(self.inputs):
            if not isinstance(value, torch.Tensor):
                self.log.detail(name, value)
                continue
            self.log.detail(f"{name}.shape", value.shape)
            if not value.is_contiguous():
                self.log.detail(f"{name}.stride()", value.stride())
        for name, shown in (self.case.details(self.inputs) if self.case.details else {}).items():
            self.log.detail(name, shown)

    def _drawn(self, seed: int) -> Inputs:
        import torch

        assert self.case is not None
        assert self.device is not None
        torch.manual_seed(seed)
        return self.case.make(self.args, self.device, torch.Generator(self.device).manual_seed(seed))

    def _call(self, runner: backends.Runner, call: Callable[[Inputs], Any], inputs: Inputs) -> Any:
        """Calls once, untimed, and keeps which implementation ran where the name of the backend does not tell."""
        if runner.resolved:
            return call(inputs)
        assert self.case is not None
        returned, self.ran[runner.name] = backends.noted(self.case, lambda: call(inputs))
        return returned

    def _check(self, runner: backends.Runner) -> dict[str, Any]:
        """Runs once on poisoned outputs and compares them with the fp64 reference."""
        assert self.case is not None
        assert self.inputs is not None
        if self.reference is None:
            self.reference = self.case.reference(fresh(self.inputs))
        return self._compare(runner, fresh(self.inputs), self.reference)

    def _check_after(self, runner: backends.Runner, timed: Inputs) -> dict[str, Any]:
        """The same behind the timing with other values in the memory that was timed: a result of an earlier call, or
        of a weight that is known by its address, is wrong.
        """
        assert self.case is not None
        inputs = overwritten(timed, self._drawn(self.args.random_seed + 1))
        return self._compare(runner, inputs, self.case.reference(fresh(inputs)))

    def _compare(self, runner: backends.Runner, inputs: Inputs, reference: Outputs) -> dict[str, Any]:
        assert self.case is not None
        refcheck.poison(inputs, self.case.poison)
        outputs = runner.outputs(inputs, self._call(runner, runner.prepare(inputs), inputs))
        tolerances = self.case.tolerances(inputs, outputs)
        own = refcheck.check(outputs, reference, tolerances, runner.library != "fi_core")
        differences = [d for rank in gathered(own) for d in rank]  # all ranks go on, or none
        wrong = [d for d in differences if not d.ok]
        for d in differences:
            self.log.detail(
                f"refcheck {d.output}",
                f"max_abs {d.max_abs:.3g}, max_rel {d.max_rel:.3g}, rel_l2 {d.rel_l2:.3g}, cosine {d.cosine:.6f}, "
                f"mismatch {d.percent:.2f}%",
            )
        for d in wrong:
            say(
                "ERROR",
                "Output mismatch between backends: "
                f"Output tensor mismatch between backends reference and {runner.name}: "
                f"{d.mismatches} / {d.elements} ({d.percent:.2f}%) elements are different (output {d.output}, worst at "
                f"{list(d.worst_index)}: got {d.worst_got:.6g}, want {d.worst_want:.6g})",
            )
        worst = max(differences, key=lambda d: (d.mismatches, d.max_abs / (d.atol or 1)))
        return {
            "status": "mismatch" if wrong else "ok",
            "reference": "fp64 torch",
            "outputs": [d.as_dict() for d in differences],
            **{k: v for k, v in worst.as_dict().items() if k not in ("ok", "dtype")},
        }

    def _options(self) -> Options:
        a = self.args
        assert self.device is not None
        cold_by_default = self.device.type == "cuda"
        return Options(
            num_iters=a.num_iters,
            dry_run_iters=a.dry_run_iters,
            cache=("cold" if cold_by_default else "warm") if a.cache == "auto" else a.cache,
            flush=a.flush,
            regime=a.regime,
            graph=not a.no_cuda_graph,
            cupti=not a.use_cuda_events,
        )

    def _report(self, label: str, found: Record) -> None:
        s, derived = found["stats"], found["derived"]
        perf(label, s["median"] / 1e6, s["std"] / 1e6, derived["tflops"], derived["tb_per_sec"])
        clock = f", SM {found['clocks']['sm_mhz_mean']:.0f} MHz" if found["clocks"].get("sm_mhz_mean") else ""
        check = f", refcheck {found['refcheck']['status']}" if "refcheck" in found else ""
        self.log.lengths(
            f"{label}: {human_time(s['median'])} [{human_time(s['ci_low'])}, {human_time(s['ci_high'])}] by "
            f"{found['timer']}, {found['regime']}, cache {found['cache_state']} ({found['cache']['how']}){clock}{check}"
        )
        for warning in found["warnings"]:
            if not warning.endswith(FALLBACK):
                say("WARNING", f"{label}: {warning}")
            elif warning not in _said:  # of the machine, not of a backend
                _said.add(warning)
                say("WARNING", warning)


@contextlib.contextmanager
def marked(name: str, on_gpu: bool) -> Iterator[None]:
    """An NVTX range, by which nsys and ncu find the calls of a case: `fi-bench: rmsnorm cuda`."""
    if not on_gpu:
        yield
        return
    import torch

    with torch.cuda.nvtx.range(f"fi-bench: {name}"):
        yield


def named(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    """The inputs by name, tensors of a tuple each by its own."""
    for name, value in inputs.items():
        members = value if isinstance(value, (tuple, list)) and value and hasattr(value[0], "shape") else None
        yield from [(name, value)] if members is None else ((f"{name}[{i}]", x) for i, x in enumerate(members))


def fresh(inputs: Inputs) -> Inputs:
    """A copy of the inputs, which a call may overwrite."""
    from fi_core.testing.l2 import clone_tree

    return Inputs(clone_tree(inputs))


def overwritten(inputs: Inputs, values: Inputs) -> Inputs:
    """The inputs with other values in the same memory; else the others, where shapes are drawn too."""
    import torch

    def pairs(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
            for x, y in zip(a, b):
                yield from pairs(x, y)
        else:
            yield a, b

    found = [pair for name, value in inputs.items() for pair in pairs(value, values[name])]
    for a, b in found:
        plain = a is None or type(a) in (int, float, bool, str, torch.dtype)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
                return values
        elif not plain or a != b:  # also what holds tensors of its own
            return values
    for a, b in found:
        if isinstance(a, torch.Tensor):
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in a.stride())
            a[once].copy_(b[once])
    return inputs


def _measured(m: Measurement, work: Work) -> Record:
    """The measured part of a record; times in nanoseconds."""
    summary = stats.summary(m.samples_ns)
    seconds = float(summary["median"]) / 1e9
    clocks: dict[str, Any] = dict(m.clocks)
    if m.sm_mhz:
        mean = sum(m.sm_mhz) / len(m.sm_mhz)
        clocks |= {"sm_mhz_mean": mean, "sm_mhz_min": min(m.sm_mhz), "cycles": seconds * mean * 1e6}
    return {
        "samples_ns": m.samples_ns,
        "sum_ns": m.sum_ns,
        "sm_mhz": m.sm_mhz,
        "timer": m.timer,
        "timer_reason": m.timer_reason,
        "regime": m.regime,
        "cache": vars(m.cache),
        "cache_state": m.cache.state,
        "warmup_n": m.warmup,
        "n_discarded": m.discarded,
        "host_ns": m.host_ns,
        "kernels": m.kernels,
        "clocks": clocks,
        "warnings": [*m.warnings, *stats.doubts(m.samples_ns)],
        "stats": summary,
        "work": {**work._asdict(), "source": "analytic"},
        "derived": {"tflops": work.flops / seconds / 1e12, "tb_per_sec": work.bytes / seconds / 1e12},
    }


def _here() -> str:
    """The device, in the words of FlashInfer's benchmark."""
    import torch

    if not torch.cuda.is_available():
        return "this CPU"
    return "compute capability {}.{}".format(*torch.cuda.get_device_capability())


_said: set[str] = set()
_environment: dict[str, Any] = {}


def environment_once() -> dict[str, Any]:
    if not _environment:
        _environment.update(environment.collect())
    return _environment


def repro_command(args: Namespace) -> str:
    """The command that repeats this point, quoted for a shell."""
    from fi_bench.flags import GENERAL

    family = family_of(args.routine)
    words = ["fi-bench", "--routine", args.routine]
    kept = {
        "backends",
        "num_iters",
        "dry_run_iters",
        "random_seed",
        "device",
        "cache",
        "flush",
        "regime",
        "no_cuda_graph",
        "use_cuda_events",
        "refcheck",
        "allow_output_mismatch",
        "case_tag",
        "enable_pdl",
    }
    for flag in (*family.flags, *(f for f in GENERAL if f.name in kept)):
        name = flag.dest or flag.name
        value = getattr(args, name)
        if value in (None, flag.default) and not flag.required:
            continue
        if flag.kind == "switch":
            words += [f"--{flag.name}"] if value else []
        elif flag.kind == "off":
            words += [] if value else [f"--{flag.name}"]
        elif flag.kind == "words":
            words += [f"--{flag.name}", *(str(word) for word in value or ())]
        else:
            words += [f"--{flag.name}", str(value)]
    return shlex.join(words)
