"""Decorators that check which backends of an operator support a call, and that raise with the reasons if none does."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from fi_core.runtime.env import env
from fi_core.runtime.errors import BackendSupportedError, ExperimentalWarning
from fi_core.runtime.signature import passed, redefine

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[..., bool]


def cuda_index(device: torch.device | str, caller: str) -> int:
    """Returns the index of a CUDA device; the current device's if it has none."""
    import torch

    found = torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"{caller}: device must be a CUDA device, got {found}")
    return torch.cuda.current_device() if found.index is None else found.index


@functools.cache
def capability_of(index: int) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(index)


def get_compute_capability(device: torch.device | str) -> tuple[int, int]:
    """Returns (major, minor) of a CUDA device.

    Raises:
        ValueError: another device.
        RuntimeError: torch sees no such GPU, or is built without CUDA.
    """
    try:
        return capability_of(cuda_index(device, "get_compute_capability"))
    except (AssertionError, RuntimeError) as error:  # torch's, with and without CUDA
        raise RuntimeError(f"get_compute_capability: torch sees no GPU {device}: {error}") from None


def capability_if_any(device: torch.device | str) -> tuple[int, int]:
    """`get_compute_capability`, or (0, 0) where there is no GPU."""
    try:
        return get_compute_capability(device)
    except RuntimeError:
        return 0, 0


def supported_compute_capability(supported_ccs: Iterable[int]) -> Callable[[F], F]:
    """Decorates a checker with the compute capabilities that its backend supports.

    Args:
        supported_ccs: list of `major * 10 + minor`.

    Raises:
        TypeError: supported_ccs is not a list of int.
    """
    if not isinstance(supported_ccs, list):
        raise TypeError(f"supported_ccs: must be a list of int, got {type(supported_ccs).__name__}")
    for cc in supported_ccs:
        if not isinstance(cc, int) or isinstance(cc, bool):
            raise TypeError(f"supported_ccs: every element must be an int, got {cc!r}")

    def decorate(func: F) -> F:
        known = frozenset(supported_ccs)
        func._supported_ccs = set(known)  # type: ignore[attr-defined]
        func.is_compute_capability_supported = lambda cc: cc in known  # type: ignore[attr-defined]
        return func

    return decorate


def experimental_backend(checker: F) -> F:
    """Marks the backend of a checker as experimental.

    The backend warns at first use, and backend="auto" skips it unless FI_ALLOW_EXPERIMENTAL_AUTO_BACKENDS=1 is set.
    """
    checker._is_experimental = True  # type: ignore[attr-defined]
    return checker


def fi_experimental_api(func: F) -> F:
    """Marks an operator as experimental: it warns at its first call."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        warn_experimental(func.__qualname__, None)
        return func(*args, **kwargs)

    wrapper.is_experimental = True  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


@functools.cache
def warn_experimental(api: str, backend: str | None) -> None:
    what = f"backend {backend!r} of {api}" if backend else api
    warnings.warn(f"{what} is experimental: it may change or go", ExperimentalWarning, stacklevel=3)


def _covers(checker: Check | None, cc: int | None) -> bool:
    """Whether a checker allows cc; a checker without a list allows any, and so does a call without a GPU tensor."""
    ccs = getattr(checker, "_supported_ccs", None)
    return cc is None or ccs is None or cc in ccs


def _lists(checker: Check | None, cc: int) -> bool:
    """Whether the list of a checker contains cc."""
    return cc in getattr(checker, "_supported_ccs", ())


def capability_of_first_tensor(values: Iterable[Any]) -> int | None:
    module = sys.modules.get("torch")
    if module is None:
        return None
    for value in values:
        if isinstance(value, module.Tensor):
            if value.device.type != "cuda":
                return None
            major, minor = get_compute_capability(value.device)
            return major * 10 + minor
    return None


class _Requirement:
    """The checkers of one operator, applied to its calls."""

    def __init__(self, func: Callable[..., Any], backends: Mapping[str, Check], common: Check | None) -> None:
        self.name = func.__name__
        self.api = func.__qualname__
        self.signature = inspect.signature(func)
        self.backends, self.common = dict(backends), common
        self.experimental = frozenset(b for b, c in self.backends.items() if getattr(c, "_is_experimental", False))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, defaults: bool) -> dict[str, Any]:
        """Returns the arguments as keywords, including those of a ** parameter."""
        bound = self.signature.bind(*args, **kwargs)
        if defaults:
            bound.apply_defaults()
        named = dict(bound.arguments)
        for parameter in self.signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named.update(named.pop(parameter.name, {}))
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                named.pop(parameter.name, None)
        return named

    def requested(self, call: dict[str, Any]) -> Any:
        if "backend" in call:
            return call["backend"]
        parameter = self.signature.parameters.get("backend")
        return None if parameter is None else parameter.default

    def suitable(self, call: dict[str, Any], cc: int | None, heuristic: Callable[..., list[str]] | None) -> list[str]:
        """Returns the backends that "auto" may use, best first."""
        assert heuristic is not None, f"{self.api}: heuristic_func is required for backend='auto'"
        if self.common is not None and not (_covers(self.common, cc) and self.common(**call)):
            raise BackendSupportedError(f"No suitable auto backends found for {self.name}: {self.why_common(cc)}")
        reasons = {name: self.refusal(name, call, cc) for name in self.backends}
        kept = [name for name, reason in reasons.items() if reason is None]
        ordered = heuristic(kept, **call) if kept else []
        if not ordered:
            lines = [f"  {name}: {reason or 'not chosen by the heuristic'}" for name, reason in reasons.items()]
            raise BackendSupportedError("\n".join([f"No suitable auto backends found for {self.name}", *lines]))
        return ordered

    def refusal(self, backend: str, call: dict[str, Any], cc: int | None) -> str | None:
        """Returns why "auto" may not use a backend; None if it may."""
        checker = self.backends[backend]
        if not _covers(checker, cc):
            return f"does not support compute capability {cc}"
        if backend in self.experimental and not env.allow_experimental_auto_backends:
            return "experimental; set FI_ALLOW_EXPERIMENTAL_AUTO_BACKENDS=1 to allow it"
        try:
            return None if checker(**call) else "does not support this problem size"
        except ValueError as error:
            return str(error)

    def check_backend(self, backend: Any, call: dict[str, Any], cc: int | None) -> None:
        checker = self.backends.get(backend)
        if checker is None or not _covers(checker, cc):
            with_cc = f" with capability {cc}" if checker is not None else ""
            raise BackendSupportedError(f"{self.name} does not support backend '{backend}'{with_cc}")
        if self.common is not None:
            self.check_common(call, cc)
        if not checker(**call):
            raise ValueError(f"Problem size is not supported for {self.name}")

    def why_common(self, cc: int | None) -> str:
        if _covers(self.common, cc):
            return "the problem size is not supported"
        ccs = sorted(getattr(self.common, "_supported_ccs", ()))
        return f"{self.name} does not support compute capability {cc}; supported compute capabilities: {ccs}"

    def check_common(self, call: dict[str, Any], cc: int | None) -> None:
        assert self.common is not None
        if not _covers(self.common, cc):
            raise BackendSupportedError(self.why_common(cc))
        if not self.common(**call):
            raise ValueError(f"Problem size is not supported for {self.name}")

    # Queries of the decorated operator

    def is_backend_supported(self, backend: str, cc: int | None = None) -> bool:
        """Whether the operator has this backend and, if cc is given, the backend lists compute capability cc."""
        if not self.backends:
            raise ValueError(f"{self.name} does not have backend choices")
        if backend not in self.backends:
            return False
        return cc is None or _lists(self.backends[backend], cc)

    def is_compute_capability_supported(self, cc: int) -> bool:
        """Whether any backend, or the operator itself if it has no backends, lists compute capability cc."""
        return any(_lists(checker, cc) for checker in (self.backends.values() if self.backends else [self.common]))

    def has_backend(self, backend: str) -> bool:
        return backend in self.backends

    def has_backend_choices(self) -> bool:
        return bool(self.backends)


def backend_requirement(
    backend_checks: Mapping[str, Check],
    common_check: Check | None = None,
    heuristic_func: Callable[..., list[str]] | None = None,
) -> Callable[[F], F]:
    """Decorates an operator so that each call is checked against its backends; `skip_check=True` skips the checks.

    A checker takes all arguments of the call as keywords, with defaults applied, and returns a bool or raises
    ValueError with a reason. With backend="auto", `op.suitable_auto_backends` holds the suitable backends
    after the call.

    Args:
        backend_checks: the checker of each backend.
        common_check: checker of all backends, or of an operator without backends.
        heuristic_func: orders the suitable backends, `heuristic_func(suitable, **arguments)`; required for "auto".

    Raises:
        BackendSupportedError: (from a call) No backend, or not the named one, supports the device or the call.
        ValueError: (from a call) The problem size is not supported.
    """

    def decorate(func: F) -> F:
        rules = _Requirement(func, backend_checks, common_check)

        @functools.wraps(func)
        def wrapper(*args: Any, skip_check: bool = False, **kwargs: Any) -> Any:
            call = rules.bind(args, kwargs, defaults=not skip_check)
            backend = rules.requested(call)
            used = backend
            if rules.backends and backend == "auto":
                cc = capability_of_first_tensor((*args, *kwargs.values()))
                chosen = rules.suitable(call, cc, heuristic_func)
                wrapper.suitable_auto_backends = chosen  # type: ignore[attr-defined]
                used = chosen[0]
            elif not skip_check:
                cc = capability_of_first_tensor((*args, *kwargs.values()))
                if rules.backends:
                    rules.check_backend(backend, call, cc)
                elif rules.common is not None:
                    rules.check_common(call, cc)
            if used in rules.experimental:
                warn_experimental(rules.api, used)
            return func(*args, **kwargs)

        wrapper.is_backend_supported = rules.is_backend_supported  # type: ignore[attr-defined]
        wrapper.is_compute_capability_supported = rules.is_compute_capability_supported  # type: ignore[attr-defined]
        wrapper.has_backend = rules.has_backend  # type: ignore[attr-defined]
        wrapper.has_backend_choices = rules.has_backend_choices  # type: ignore[attr-defined]
        wrapper.experimental_backends = rules.experimental  # type: ignore[attr-defined]
        return wrapper  # type: ignore[return-value]

    return decorate


def named_backends(
    names: Mapping[str, str | None], supported_ccs: Iterable[int], unnamed: bool = False
) -> Callable[[F], F]:
    """Decorates an operator whose backends are names of the same kernels: a call costs one look-up of the name.

    The operator has the queries of `backend_requirement`, and takes `skip_check=True`. Its kernels check the arguments.

    Args:
        names: by name, None, or the reason why this library cannot serve it.
        supported_ccs: the compute capabilities of the kernels.
        unnamed: the operator has no parameter `backend`.

    Raises:
        BackendSupportedError: (from a call) The backend is unknown or cannot serve; with the reason.
    """

    def decorate(func: F) -> F:
        check = supported_compute_capability(list(supported_ccs))(lambda **_: True)
        serving = {name: check for name, reason in names.items() if reason is None}
        rules = _Requirement(func, serving, check if unnamed else None)

        def refuse(backend: object) -> NoReturn:
            reason = names.get(backend) or f"it has {', '.join(serving)}"  # type: ignore[call-overload]
            raise BackendSupportedError(f"{rules.name} does not support backend {backend!r}: {reason}")

        parameters = list(rules.signature.parameters.values())
        named = "" if unnamed else "if backend not in serving and backend is not None:\n    refuse(backend)\n"
        skip = inspect.Parameter("skip_check", inspect.Parameter.KEYWORD_ONLY, default=False)
        scope: dict[str, Any] = {"func": func, "serving": serving, "refuse": refuse}
        made = redefine(func, [*parameters, skip], f"{named}return func({passed(parameters)})", scope)
        wrapper: Any = functools.update_wrapper(made, func)
        wrapper.__kwdefaults__ = {**(func.__kwdefaults__ or {}), "skip_check": False}
        for query in ("is_backend_supported", "is_compute_capability_supported", "has_backend", "has_backend_choices"):
            setattr(wrapper, query, getattr(rules, query))
        return wrapper  # type: ignore[no-any-return]

    return decorate
