"""The exceptions and warnings of fi, one class per kind of trouble; each docstring says who raises it and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn


class FiError(Exception):
    """Base of the errors that only fi raises."""


class UnsupportedError(FiError, ValueError):
    """Raised by dispatch when no implementation supports the shape, dtype or target; with the reason of each."""

    def __init__(self, message: str, reasons: Mapping[str, str | Sequence[str]] | None = None) -> None:
        self.reasons: dict[str, tuple[str, ...]] = {
            name: (why,) if isinstance(why, str) else tuple(why) for name, why in (reasons or {}).items()
        }
        lines = [f"  {name}: {'; '.join(why)}" for name, why in self.reasons.items()]
        super().__init__("\n".join([message, *lines]))


class UnknownWordError(FiError, KeyError):
    """Raised for a layout, encoding or backend of an unknown name: a KeyError, as FlashInfer's, with a plain text."""

    def __str__(self) -> str:
        return str(self.args[0])


class WrongDtypeError(FiError, TypeError, AssertionError):
    """Raised for a dtype where FlashInfer's function has an assertion: a TypeError, as in other functions here."""


class WrongBackendError(FiError, ValueError, AssertionError):
    """Raised for a backend where FlashInfer's wrapper has an assertion: a ValueError, as in other wrappers here."""


def blame(error: Exception, **tensors: Any) -> NoReturn:
    """Raises a TypeError for the first of these arguments that is not a dense tensor, else the error of the call."""
    import torch

    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: a torch.Tensor is required; got {type(value).__name__}") from None
        if value.is_nested or not value.ndim:
            form = "a nested tensor" if value.is_nested else "a tensor without dimensions"
            raise TypeError(f"{name}: a dense tensor with dimensions is required; got {form}") from None
    raise error


def without_frames(error: Exception) -> Exception:
    """An error in words of our own without the frames that found it: they tell a user nothing."""
    native = type(error) in (ValueError, TypeError)  # by the host entry
    return error.with_traceback(None) if native or isinstance(error, FiError) else error


class PlanError(FiError, RuntimeError):
    """Raised where the planner refuses a batch: a RuntimeError, as FlashInfer's."""


class MissingKernelError(FiError, RuntimeError):
    """Raised by the resolver when a kernel is not prebuilt and FI_JIT=off forbids to compile it."""

    def __init__(self, message: str, spec: Any = None) -> None:
        self.spec = spec
        super().__init__(message)

    @classmethod
    def of(cls, spec: Any, misses: Iterable[tuple[str, str]] = ()) -> MissingKernelError:
        """The error for a spec or a file of it, with advice, and the reason of each place that has no fitting file."""
        name = getattr(spec, "name", spec)
        head = (
            f"kernel {name!r} is not prebuilt and compiling is turned off (FI_JIT=off). Install the prebuilt kernels "
        )
        head += 'with `pip install "fi-core[prebuilt]"`, or build it ahead with `fi-core prebuild`, or set FI_JIT=on.'
        return cls("\n  ".join([head, *(f"{place}: {why}" for place, why in misses)]), spec)


MissingJITCacheError = MissingKernelError  # the name FlashInfer callers catch


class CompileError(FiError, RuntimeError):
    """Raised by the JIT when a compiler rejects a unit: the first line that matters, a hint, and the path of the
    log.
    """

    def __init__(
        self,
        first_line: str,
        *,
        hint: str | None = None,
        log_path: str | Path | None = None,
        more: Sequence[str] = (),
    ) -> None:
        self.first_line, self.hint = first_line, hint
        self.log_path = Path(log_path) if log_path is not None else None
        parts = [first_line, *more]
        if hint:
            parts.append(f"hint: {hint}")
        if self.log_path:
            parts.append(f"full output: {self.log_path}")
        super().__init__("\n".join(parts))


class BackendSupportedError(Exception):
    """Raised by `backend_requirement` when an op has no such backend, or none for the compute capability."""


class GPUArchitectureError(Exception):
    """Raised by an op that needs another GPU architecture than the one the tensors are on."""


class LibraryError(Exception):
    """Raised by an op that needs a library (cuDNN, NCCL, ...) which is missing or too old."""


class ExperimentalWarning(UserWarning):
    """Issued once per API and backend when an implementation marked experimental is used for the first time."""


def refuse(instead: str, **options: Any) -> None:
    """Raises NotImplementedError for the first option that is set, so neither None nor False nor 0; says what to do."""
    for name, value in options.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise unsupported(name, value, instead)


def unsupported(name: str, came: Any, instead: str) -> NotImplementedError:
    """The error for an argument value that no kernel supports; `instead` is the advice."""
    shape, dtype = getattr(came, "shape", None), getattr(came, "dtype", None)
    got = repr(came) if shape is None else f"{dtype} of shape {tuple(shape)}"
    return NotImplementedError(f"{name}: not supported, {instead}; got {got}")


def missing_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a name that a module with lazy names does not have; it suggests the closest known name."""
    message = f"module {module!r} has no attribute {name!r}"
    close = []
    if not name.startswith("_"):  # Python and its tools ask for dunder names that are not there
        import difflib

        close = difflib.get_close_matches(name, known, 1)
    if not close:
        return AttributeError(message, name=name)
    # NOTE: a traceback derives a suggestion from `obj`; None keeps it from repeating this one.
    return AttributeError(f"{message}; did you mean {close[0]!r}?", name=name, obj=None)
