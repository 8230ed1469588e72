"""torch.ops.fi_core.*: the out-variant of every op with a fake, and the test whether a call must take it.

A plain call launches the kernel without torch's dispatcher, which costs more than a small kernel. A call takes the
registered operator if a dispatch mode is active (fake tensors, make_fx, export, loggers), if a tensor is of a subclass
with its own dispatch, or if functorch (vmap, grad) wraps a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fi_core.runtime.errors import without_frames
from fi_core.runtime.lazy import torch
from fi_core.runtime.spec.arguments import Argument
from fi_core.runtime.spec.op import Op
from fi_core.runtime.tensors import is_special, note, real_among_fakes, unreadable


def signal(scope: dict[str, Any], before: Any = lambda: None) -> None:
    """Names in a scope the C functions that an operator asks on every call: the number of dispatch `modes`, and whether
    autograd `records`. Torch is imported, and `before` called, by the first call: declarations must not import it. The
    first call may be traced, so `before` is named too, as `registered`.
    """

    def modes() -> int:
        before()
        scope.update(modes=torch._C._len_torch_dispatch_stack, records=torch.is_grad_enabled)
        return torch._C._len_torch_dispatch_stack()

    before._dynamo_marked_constant = True  # torch.compile calls it, and does not trace it
    scope.update(modes=modes, registered=before)


@functools.cache
def register(op: Op, direct: Callable[..., Any]) -> Any:
    """Defines `torch.ops.fi_core.<op>` once (define/impl costs 1.3 us a call, the custom_op decorator 8-11).

    Args:
        op: the op.
        direct: launches its kernel whatever the dispatcher's state is.
    """

    def run(*arguments: Any) -> None:
        refuse_autograd(op, *arguments)
        direct(*arguments)

    def mapped(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[None, None]:
        """vmap: one call per element, on views of the batch."""
        for argument, value, dim in zip(op.parsed, arguments, in_dims):
            if argument.written and value is not None and dim is None:
                raise ValueError(f"{op.name}: {argument.name} is written, so vmap must map it too; got in_dims of None")
        for i in range(info.batch_size):
            call(op.name, tuple(a if dim is None else a.select(dim, i) for a, dim in zip(arguments, in_dims)))
        return None, None

    library = torch.library.Library("fi_core", "FRAGMENT")
    library.define(f"{op.name}{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(op.name, run, "CompositeExplicitAutograd")
    # An out-variant returns nothing: shapes and dtypes are those of its arguments.
    torch.library.register_fake(f"fi_core::{op.name}", functools.partial(refuse_autograd, op), lib=library)
    torch.library.register_vmap(f"fi_core::{op.name}", mapped, lib=library)
    return library  # kept by the cache: the registration lives as long as this object


def call(name: str, arguments: tuple[Any, ...], variant: Any = None) -> None:
    """Calls the registered op. torch.compile traces this. Raises NotImplementedError for a user's variant."""
    if variant is not None:
        raise NotImplementedError(f"{name}: an attention variant has no torch operator, so torch cannot trace it")
    getattr(torch.ops.fi_core, name)(*arguments)


def dispatch(op: Op, arguments: tuple[Any, ...], variant: Any = None) -> None:
    """Calls the registered op outside of torch.compile. Raises NotImplementedError if autograd records a tensor."""
    check(op, arguments, wrapped=True)
    for argument, value in zip(op.parsed, arguments):
        if wanted := argument.wanted(value):  # host entries look for this in direct calls
            raise TypeError(f"{op.name}: {argument.name} must be {wanted}; got a {type(value).__name__}")
    refuse_autograd(op, *arguments)
    try:
        if real := real_among_fakes(arguments):  # torch's own error prints all elements, which takes seconds
            raise TypeError(f"{op.parsed[real[0]].name} is a real tensor among fake ones")
        call(op.name, arguments, variant)
    except (AssertionError, RuntimeError, TypeError) as error:
        names = ", ".join(a.name for a, value in zip(op.parsed, arguments) if is_special(value))
        own = isinstance(error, TypeError) and str(error).startswith(f"{op.name}: ")
        if not names or own or type(error) not in (AssertionError, RuntimeError, NotImplementedError, TypeError):
            raise
        kind = TypeError if isinstance(error, AssertionError) else type(error)
        raise kind(f"{op.name}: torch's dispatcher, which alone can read {names}, refuses the call: {error}") from error


def refuse_autograd(op: Op, *arguments: Any) -> None:
    """Raises NotImplementedError, as torch's `out=` functions do, if autograd would record the call."""
    for argument, value in zip(op.parsed, arguments) if torch.is_grad_enabled() else ():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise NotImplementedError(
                f"{op.name}: there is no backward, and {argument.name} requires grad: call it under torch.no_grad() or "
                "torch.inference_mode(), or pass detach()ed tensors"
            )


def check(op: Op, arguments: Sequence[Any], *, wrapped: bool, taken: Sequence[Argument] = ()) -> None:
    """Raises TypeError naming the first argument that no kernel can read. wrapped: special tensors pass; taken: the
    arguments in their order, if that is not the declared one.
    """
    # Outputs are made after inputs.
    for argument, value in sorted(zip(taken or op.parsed, arguments), key=lambda pair: pair[0].written):
        if not argument.is_tensor or (value is None and argument.kind == "Tensor?") or (wrapped and is_special(value)):
            continue
        if problem := unreadable(value):
            raise TypeError(f"{op.name}: {argument.name} must be a dense tensor with data; {problem}")


def explain(op: Op, arguments: tuple[Any, ...], error: Exception) -> NoReturn:
    """Raises the error of a failed call; if no kernel can read an argument, the error that names it."""
    tensors = list(zip((argument.name for argument in op.parsed), arguments))  # by which callers find their names
    try:
        check(op, arguments, wrapped=True)
    except TypeError as named:
        raise note(named, tensors).with_traceback(None) from None
    raise without_frames(note(error, tensors))


def requires_grad(arguments: Sequence[Argument]) -> str:
    """Python code for "a tensor argument requires grad"."""
    of_each = {"Tensor": "{0}.requires_grad", "Tensor?": "{0} is not None and {0}.requires_grad"}
    return " or ".join(of_each[a.kind].format(a.name) for a in arguments if a.is_tensor)
