"""fi_api: the decorator of every public op. It logs calls (FI_LOGLEVEL) and costs nothing while logging is off.

The level is read once, when this module is imported. At level 0 the op itself is returned, with attributes only.
Inputs are logged before the call, so that the last lines of the log name the call that brought the process down.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar, overload

from fi_core.env import env
from fi_core.observe.dump import Dumper
from fi_core.observe.format import describe
from fi_core.observe.trace import Trace, attach_trace, auto_dump

F = TypeVar("F", bound=Callable[..., Any])

RULE = "=" * 80
THIN_RULE = "-" * 80
logger = logging.getLogger("fi_core.api")


@dataclass(frozen=True)
class Settings:
    """What the environment asks of the log, as read at import."""

    level: int = 0
    dest: str = "stdout"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    trace_dump: bool = False

    @classmethod
    def from_env(cls) -> Settings:
        return cls(env.loglevel, env.logdest, env.dump_include, env.dump_exclude, env.trace_dump)

    def selects(self, label: str) -> bool:
        """Whether a function is logged at level >= 3."""
        if any(fnmatchcase(label, pattern) for pattern in self.exclude):
            return False
        return not self.include or any(fnmatchcase(label, pattern) for pattern in self.include)


def _configure(dest: str) -> None:
    """Send the log to its destination, the message alone, and nowhere else."""
    handler: logging.Handler
    if dest in ("stdout", "stderr"):
        handler = logging.StreamHandler(getattr(sys, dest))
    else:
        handler = logging.FileHandler(dest.replace("%i", str(os.getpid())), mode="a", delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG)
    logger.propagate = False


def _version() -> tuple[str, str]:
    package = sys.modules["fi_core"]
    return getattr(package, "__version__", "unknown"), getattr(package, "__git_commit__", "unknown")


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _system_lines() -> Iterator[str]:
    torch = sys.modules.get("torch")  # not imported for the sake of the log
    yield from (RULE, f"[{_now()}] FlashInfer API Logging - System Information", RULE)
    yield f"fi-core version: {_version()[0]}"
    yield f"CUDA toolkit version: {torch.version.cuda if torch else 'unknown (torch is not imported)'}"
    if torch is not None and torch.cuda.is_available():
        yield f"cuDNN version: {torch.backends.cudnn.version()}"
        yield f"Number of GPUs: {torch.cuda.device_count()}"
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            yield f"  GPU {index}: {torch.cuda.get_device_name(index)}"
            yield f"    Compute capability: {major}.{minor} (SM{major}{minor})"
    else:
        yield from ("cuDNN version: unknown", "Number of GPUs: 0")
    yield f"PyTorch version: {torch.__version__ if torch else 'unknown (torch is not imported)'}"
    yield from (RULE, "")


@functools.cache
def _log_system_once() -> None:
    """At the first logged call, since asking the GPUs for their names opens a CUDA context."""
    logger.info("\n".join(_system_lines()))


def _label(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    if args:
        owner = type(args[0]).__name__
        if "Wrapper" in owner:
            return f"{owner}.{func.__name__}"
    return func.__name__


def _input_lines(
    label: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], statistics: bool
) -> Iterator[str]:
    yield from (RULE, f"[{_now()}] FlashInfer API Call: {label}", THIN_RULE)
    if args:
        yield "Positional input arguments:"
        for index, value in enumerate(args):
            yield f"  arg[{index}]:"
            yield from describe(value, 2, statistics)
    if kwargs:
        yield "Keyword input arguments:"
        for name, value in kwargs.items():
            yield f"  {name}="
            yield from describe(value, 2, statistics)
    if not args and not kwargs:
        yield "(No explicit arguments)"
    given = signature.bind_partial(*args, **kwargs).arguments
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in given and parameter.default is not inspect.Parameter.empty
    }
    if defaults:
        yield "Default parameters (not explicitly provided):"
        for name, value in defaults.items():
            yield f"  {name}= [DEFAULT]"
            yield from describe(value, 2, statistics)


def _output_lines(result: Any, statistics: bool) -> Iterator[str]:
    yield "Output value:"
    yield from describe(result, 1, statistics)
    yield from (RULE, "")


class _Call:
    """One call of an op on its way through the log; no step of it may break the call."""

    def __init__(self, func: Callable[..., Any], signature: inspect.Signature, label: str) -> None:
        self.func, self.signature, self.label = func, signature, label
        self.statistics = settings.level >= 5
        self.dump: Any = None

    def step(self, action: Callable[..., None], *values: Any) -> None:
        try:
            action(*values)
        except Exception as error:
            logger.warning("[%s] logging of %s failed: %s: %s", _now(), self.label, type(error).__name__, error)

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if settings.level < 3:
            logger.info("[%s] FlashInfer API Call: %s", _now(), self.label)
            return
        logger.info("\n".join(_input_lines(self.label, self.signature, args, kwargs, self.statistics)))
        if dumper is not None:
            self.dump = dumper.inputs(self.func, self.label, self.signature, args, kwargs)

    def after(self, result: Any) -> None:
        logger.info("\n".join(_output_lines(result, self.statistics)))
        if self.dump is not None:
            self.dump.outputs(result)


def _logged(func: F) -> F:
    signature = inspect.signature(func)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        label = _label(func, args)
        if settings.level >= 3 and not settings.selects(label):
            return func(*args, **kwargs)
        call = _Call(func, signature, label)
        call.step(_log_system_once)
        call.step(call.before, args, kwargs)
        result = func(*args, **kwargs)
        if settings.level >= 3:
            call.step(call.after, result)
        return result

    return wrapper  # type: ignore[return-value]


@overload
def fi_api(func: F) -> F: ...
@overload
def fi_api(func: None = None, *, trace: Trace | None = None) -> Callable[[F], F]: ...
def fi_api(func: F | None = None, *, trace: Trace | None = None) -> F | Callable[[F], F]:
    """Mark a public op: `@fi_api`, or `@fi_api(trace=TEMPLATE)` to give it `fi_trace` too."""

    def decorate(op: F) -> F:
        if trace is not None:
            attach_trace(op, trace)
        decorated = auto_dump(op, trace) if trace is not None and settings.trace_dump else op
        return _logged(decorated) if settings.level == 1 or settings.level >= 3 else decorated

    return decorate if func is None else decorate(func)


settings = Settings.from_env()
dumper: Dumper | None = None
if settings.level > 0:
    _configure(settings.dest)
    logger.info("fi-core %s (commit %s)", _version()[0], _version()[1][:8])
if settings.level >= 10:
    dumper = Dumper.from_env(logger)
