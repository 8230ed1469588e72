"""torch.ops.fi_core.*: the out-variant of every op with a fake, and the test whether a call must take it.

A plain call launches the kernel without torch's dispatcher, which costs more than a small kernel. A call takes the
registered operator if a dispatch mode is active (fake tensors, make_fx, export, loggers), if a tensor is of a subclass
with its own dispatch, or if functorch (vmap, grad) wraps a tensor.
"""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fi_core.runtime.errors import FiError
from fi_core.runtime.spec.arguments import Argument
from fi_core.runtime.spec.op import Op

NAMESPACE = "fi_core"


def signals() -> dict[str, Callable[[], Any]]:
    """C functions that an operator asks on every call: the number of dispatch modes, and whether autograd records."""
    import torch

    return {"modes": torch._C._len_torch_dispatch_stack, "records": torch.is_grad_enabled}


@functools.cache
def register(op: Op, direct: Callable[..., Any]) -> Any:
    """Defines `torch.ops.fi_core.<op>` once (define/impl costs 1.3 us a call, the custom_op decorator 8-11).

    Args:
        op: the op.
        direct: launches its kernel whatever the dispatcher's state is.
    """
    import torch

    def run(*arguments: Any) -> None:
        refuse_autograd(op, arguments)
        direct(*arguments)

    def fake(*arguments: Any) -> None:
        """An out-variant returns nothing: shapes and dtypes are those of its arguments."""
        refuse_autograd(op, arguments)

    def mapped(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[None, None]:
        """vmap: one call per element, on views of the batch."""
        for argument, value, dim in zip(op.parsed, arguments, in_dims):
            if argument.written and value is not None and dim is None:
                raise ValueError(f"{op.name}: {argument.name} is written, so vmap must map it too; got in_dims of None")
        for i in range(info.batch_size):
            call(op.name, tuple(a if dim is None else a.select(dim, i) for a, dim in zip(arguments, in_dims)))
        return None, None

    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{op.name}{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(op.name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{op.name}", fake, lib=library)
    torch.library.register_vmap(f"{NAMESPACE}::{op.name}", mapped, lib=library)
    return library  # kept by the cache: the registration lives as long as this object


def call(name: str, arguments: tuple[Any, ...], variant: Any = None) -> None:
    """Calls the registered op. torch.compile traces this. Raises NotImplementedError for a user's variant."""
    import torch

    if variant is not None:
        raise NotImplementedError(f"{name}: an attention variant has no torch operator, so torch cannot trace it")
    getattr(torch.ops.fi_core, name)(*arguments)


def dispatch(op: Op, arguments: tuple[Any, ...], variant: Any = None) -> None:
    """Calls the registered op outside of torch.compile. Raises NotImplementedError if autograd records a tensor."""
    check(op, arguments, wrapped=True)
    _check_options(op, arguments)
    _refuse_mixture(op, arguments)
    refuse_autograd(op, arguments)
    try:
        call(op.name, arguments, variant)
    except (AssertionError, RuntimeError, TypeError) as error:
        names = ", ".join(a.name for a, value in zip(op.parsed, arguments) if is_special(value))
        own = isinstance(error, TypeError) and str(error).startswith(f"{op.name}: ")
        if not names or own or type(error) not in (AssertionError, RuntimeError, NotImplementedError, TypeError):
            raise
        kind = TypeError if isinstance(error, AssertionError) else type(error)
        raise kind(f"{op.name}: torch's dispatcher, which alone can read {names}, refuses the call: {error}") from error


_OPTIONS: dict[str, tuple[type, str]] = {
    "int": (numbers.Integral, "an integer"),
    "float": (numbers.Real, "a number"),
    "bool": (numbers.Integral, "a bool"),
    "str": (str, "a string"),
}


def _check_options(op: Op, arguments: tuple[Any, ...]) -> None:
    """Raises TypeError naming the first number, flag or word of a wrong type; host entries do so in direct calls."""
    for argument, value in zip(op.parsed, arguments):
        kind, words = _OPTIONS.get(argument.kind.removesuffix("?"), (object, ""))
        if not isinstance(value, kind) and not (value is None and argument.kind.endswith("?")):
            raise TypeError(f"{op.name}: {argument.name} must be {words}; got a {type(value).__name__}")


def _refuse_mixture(op: Op, arguments: tuple[Any, ...]) -> None:
    """Raises TypeError naming a tensor with data beside a fake one; torch's error prints all elements."""
    known: Any = sys.modules.get("torch._subclasses.fake_tensor")
    fakes = {a.name: x for a, x in zip(op.parsed, arguments) if known and isinstance(x, known.FakeTensor)}
    if not fakes or next(iter(fakes.values())).fake_mode.allow_non_fake_inputs:
        return
    for argument, value in zip(op.parsed, arguments):
        if argument.is_tensor and value is not None and argument.name not in fakes:
            raise TypeError(
                f"{op.name}: fake tensors and others do not go together; {', '.join(fakes)} got a fake one, "
                f"{argument.name} one with data: make all or none by the FakeTensorMode"
            )


def refuse_autograd(op: Op, arguments: tuple[Any, ...]) -> None:
    """Raises NotImplementedError, as torch's `out=` functions do, if autograd would record the call."""
    import torch

    if not torch.is_grad_enabled():
        return
    for argument, value in zip(op.parsed, arguments):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise NotImplementedError(
                f"{op.name}: there is no backward, and {argument.name} requires grad: call it under torch.no_grad() or "
                "torch.inference_mode(), or pass detach()ed tensors"
            )


def is_special(value: Any) -> bool:
    """Whether only torch's dispatcher knows what a tensor is: a subclass with its own dispatch, or a wrapped tensor.

    A nested tensor is none: no operator takes it.
    """
    import torch

    private: Any = torch  # its stubs leave some names out
    kind: Any = type(value)
    return (
        isinstance(value, torch.Tensor)
        and not value.is_nested
        and (
            kind.__torch_dispatch__ is not private.Tensor.__torch_dispatch__
            or private._C._functorch.is_functorch_wrapped_tensor(value)
            or private._is_functional_tensor(value)
        )
    )


def check(op: Op, arguments: Sequence[Any], *, wrapped: bool, taken: Sequence[Argument] = ()) -> None:
    """Raises TypeError naming the first argument that no kernel can read. wrapped: special tensors pass; taken: the
    arguments in their order, if that is not the declared one.
    """
    pairs = sorted(
        zip(taken or op.parsed, arguments), key=lambda pair: pair[0].written
    )  # outputs are made after inputs
    for argument, value in pairs:
        if not argument.is_tensor or (value is None and argument.kind == "Tensor?") or (wrapped and is_special(value)):
            continue
        if problem := unreadable(value):
            raise TypeError(f"{op.name}: {argument.name} must be a dense tensor with data; {problem}")


def unreadable(value: Any) -> str:
    """Why no kernel can read this tensor, and what to do; empty if one can."""
    import torch

    if is_special(value):
        return "got a tensor that only torch's dispatcher can read"
    if not isinstance(value, torch.Tensor):
        return f"got {'None' if value is None else f'a {type(value).__name__}'}: pass a torch.Tensor"
    if value.is_nested:
        return "got a nested tensor: pass its values() and offsets()"
    if value.is_quantized:
        return "got a quantized tensor: pass its dequantize()d values"
    if value.layout is not torch.strided:
        return f"got layout {value.layout}: call to_dense() on it"
    if value.is_meta:
        return "got a meta tensor, which has no data: pass a tensor on a cpu or cuda device"
    if value.is_conj():
        return "got a conjugate view: call resolve_conj() on it"
    if value.is_neg():
        return "got a negative view: call resolve_neg() on it"
    return ""


def refusing_unreadable(op: Op, taken: Sequence[Argument], call: Callable[..., Any]) -> Callable[..., Any]:
    """The call behind a check of each tensor. Without it, C++ sees no negated view and not every fake tensor."""

    def checked(*values: Any) -> Any:
        check(op, values, wrapped=False, taken=taken)
        return call(*values)

    return checked


def recover(op: Op, arguments: tuple[Any, ...], error: Exception) -> None:
    """Returns if a failed call must take the registered op; else raises its error.

    tvm-ffi converts all tensors before the kernel runs, so a call that fails for a special tensor has done nothing.
    """
    if not any(map(is_special, arguments)):
        explain(op, arguments, error)


def explain(op: Op, arguments: tuple[Any, ...], error: Exception) -> NoReturn:
    """Raises the error of a failed call; if no kernel can read an argument, the error that names it."""
    try:
        check(op, arguments, wrapped=True)
    except TypeError as named:
        raise named.with_traceback(None) from None
    raise without_frames(error)


def without_frames(error: Exception) -> Exception:
    """An error in words of our own without the frames that found it: they tell a user nothing."""
    native = type(error) in (ValueError, TypeError)  # by the host entry
    return error.with_traceback(None) if native or isinstance(error, FiError) else error


def is_explained(error: Exception) -> bool:
    """Whether the words of an error are ours, so that no frame is needed to understand it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    raised_here = last is not None and last.tb_frame.f_code in (explain.__code__, dispatch.__code__)
    return raised_here or isinstance(error, FiError)


def requires_grad(arguments: tuple[Argument, ...]) -> str:
    """Python code for "a tensor argument requires grad"."""
    required = [f"{a.name}.requires_grad" for a in arguments if a.kind == "Tensor"]
    return " or ".join(
        required + [f"{a.name} is not None and {a.name}.requires_grad" for a in arguments if a.kind == "Tensor?"]
    )
