"""fi_api: the decorator of every public op. It logs calls (FI_LOGLEVEL), which costs nothing while logging is off.

A call that fails on an argument of a wrong type names it (checked.py). The level is read once, when this module is
imported. At level 0 a class is unchanged; at other levels its `__init__` is logged too.
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
from pathlib import Path
from typing import Any, TypeVar, overload

from fi_core.observe import api
from fi_core.observe.checked import checked
from fi_core.observe.dump import DumpedCall, Dumper
from fi_core.observe.format import describe
from fi_core.observe.trace import Planned, Trace, attach_trace, auto_dump
from fi_core.runtime import files
from fi_core.runtime.env import env

F = TypeVar("F", bound=Callable[..., Any])

RULE = "=" * 80
THIN_RULE = "-" * 80
logger = logging.getLogger("fi_core.api")


@dataclass(frozen=True)
class Settings:
    """Settings of the log, read from the environment at import."""

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


def configure(dest: str) -> None:
    """Send the log to its destination, the message alone, and nowhere else."""
    handler: logging.Handler
    problem = None
    if dest in ("stdout", "stderr"):
        handler = logging.StreamHandler(getattr(sys, dest))
    else:
        try:
            handler = files.log_handler(Path(dest.replace("%i", str(os.getpid()))))
        except (OSError, ValueError) as error:  # a log that cannot be written stops nothing
            problem, handler = error, logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    if problem is not None:
        logger.warning("FI_LOGDEST: %s; the log goes to stderr", problem)


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
def log_system_once() -> None:
    """At the first logged call, since asking the GPUs for their names opens a CUDA context."""
    logger.info("\n".join(_system_lines()))


def _label(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The name of a call in the log: a method's has the class of its object."""
    is_method = "." in func.__qualname__.rpartition("<locals>.")[2]
    return f"{type(args[0]).__name__}.{func.__name__}" if is_method and args else func.__name__


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
    """Logs and dumps one call of an op. An error in a step becomes a warning and does not break the call."""

    def __init__(self, target: str, signature: inspect.Signature, label: str) -> None:
        self.target, self.signature, self.label = target, signature, label
        self.statistics = settings.level >= 5
        self.dumper = dumper if settings.level >= 3 else None
        self.is_outermost = self.dumper is not None and self.dumper.enter()
        self.dump: DumpedCall | None = None

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

    def save_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.dumper is not None and self.is_outermost:
            self.dump = self.dumper.inputs(self.target, self.label, self.signature, args, kwargs)

    def after(self, result: Any) -> None:
        logger.info("\n".join(_output_lines(result, self.statistics)))

    def save_outputs(self, result: Any) -> None:
        if self.dump is not None:
            self.dump.outputs(result)

    def leave(self) -> None:
        if self.dumper is not None:
            self.dumper.leave()


def _logged(func: F, target: str) -> F:
    """The function with its log. target: its name in the registry of the API."""
    signature = inspect.signature(func)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        label = _label(func, args)
        if settings.level >= 3 and not settings.selects(label):
            return func(*args, **kwargs)
        call = _Call(target, signature, label)
        try:
            call.step(log_system_once)
            call.step(call.before, args, kwargs)
            call.step(call.save_inputs, args, kwargs)
            result = func(*args, **kwargs)
        finally:
            call.leave()
        if settings.level >= 3:
            call.step(call.after, result)
            call.step(call.save_outputs, result)
        return result

    wrapper.__fi_op__ = func  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def _log_class(cls: type) -> None:
    """Logs `__init__` of a class, its own or an inherited one."""
    own: Any = cls.__init__  # type: ignore[misc]
    plain: Any = getattr(own, "__fi_op__", own)
    cls.__init__ = _logged(plain, f"{api.name_of(cls)}.__init__")  # type: ignore[misc]


@overload
def fi_api(func: F) -> F: ...
@overload
def fi_api(func: None = None, *, trace: Trace | None = None, planned: Planned | None = None) -> Callable[[F], F]: ...
def fi_api(
    func: F | None = None, *, trace: Trace | None = None, planned: Planned | None = None
) -> F | Callable[[F], F]:
    """Mark a public op or a class of the API.

    `@fi_api(trace=TEMPLATE)` gives the op `fi_trace` too. planned: for a method, arguments that its object holds since
    an earlier call (its `plan`), by name: an attribute of the object, or a function of it.
    """

    def decorate(op: F) -> F:
        api.register(op)
        is_logged = settings.level >= 1
        in_module = "<locals>" not in op.__qualname__  # what a caller can import
        if isinstance(op, type):
            own: Any = op.__init__  # type: ignore[misc]
            if in_module and own is not object.__init__ and not hasattr(own, "__wrapped__"):
                own = op.__init__ = checked(own)  # type: ignore[misc]
                own.__qualname__ = f"{op.__qualname__}.__init__"  # of an inherited one, too: errors name the class
            if is_logged:
                _log_class(op)
            return op  # pyright: ignore[reportReturnType]
        if trace is not None:
            attach_trace(op, trace, planned)
        decorated = auto_dump(op, trace, planned) if trace is not None and settings.trace_dump else op
        if in_module and not planned:  # `run` of a planned wrapper has many options, and a frame costs time
            decorated = checked(decorated)
        return _logged(decorated, api.name_of(op)) if is_logged else decorated

    return decorate if func is None else decorate(func)


settings = Settings.from_env()
dumper: Dumper | None = None
if settings.level > 0:
    configure(settings.dest)
    logger.info("fi-core %s (commit %s)", _version()[0], _version()[1][:8])
if settings.level >= 10:
    dumper = Dumper.from_env(logger)
