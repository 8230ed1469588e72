"""Errors of public calls: a call that fails for an argument's type, kind or rank raises an error that names it.

Types are compared after a call has failed, by its annotations, so a good call pays one frame.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from fi_core.observe import api
from fi_core.observe.subject import leaves, rename
from fi_core.observe.template import Tensor
from fi_core.runtime.errors import FiError, UnknownWordError, UnsupportedError
from fi_core.runtime.launch import torch_op
from fi_core.runtime.launch.operator import operators
from fi_core.runtime.signature import define
from fi_core.runtime.tensors import is_special, unreadable

F = TypeVar("F", bound=Callable[..., Any])
_PREFIX: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_TYPES: dict[str, tuple[type, ...]] = {
    "None": (type(None),),
    "bool": (numbers.Integral,),
    "int": (numbers.Integral,),
    "float": (numbers.Real,),
    "str": (str,),
    "tuple": (tuple, list),
    "list": (tuple, list),
    "Sequence": (tuple, list),
    "dict": (Mapping,),
    "Mapping": (Mapping,),
}
_WORDS = {
    "torch.Tensor": "a torch.Tensor",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a bool",
    "Sequence": "a tuple or list",
    "dict": "a dict",
    "Mapping": "a dict",
}


_LACKS_DTYPE = re.compile(r"not implemented for '\w+'|Promotion for .*attempted to promote \w+ and \w+")
_PLAIN = (ValueError, TypeError, NotImplementedError, UnknownWordError)  # of a caller's mistake
# Classes of errors that fi itself raises as subclasses only.
_FOREIGN = (AttributeError, IndexError, RuntimeError, AssertionError, ZeroDivisionError, OverflowError)


def checked(function: F) -> F:
    """The function, which names the argument whose type made a call fail; signature and attributes are the same."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    taken: list[str] = []
    given: list[str] = []
    kinds = [p.kind for p in parameters]
    # Of many keywords a call leaves most out, so they are packed, since each name costs; one costs less by its name.
    packs = kinds.count(inspect.Parameter.KEYWORD_ONLY) > 1 or not {*_PREFIX}.isdisjoint(kinds)
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not packs:
            taken += ["*", f"{p.name}=None"]
            given.append(f"{p.name}={p.name}")
            continue
        star = "**" if p.kind is p.KEYWORD_ONLY else _PREFIX.get(p.kind, "")
        name = "options" if star == "**" else p.name
        if f"**{name}" not in given:
            taken.append(f"{star}{name}{'' if star or p.default is p.empty else '=None'}")  # true defaults: below
            given.append(f"{star}{name}")
    shown = inspect.signature(function).parameters  # a decorator may take a keyword that it does not show
    told = [text for text in given if "=" not in text or text.partition("=")[0] in shown]
    body = f"""\
try:
    return function({", ".join(given)})
except Exception as error:
    explain(error, function, {", ".join(told)})"""
    made: Any = define(function.__name__, taken, body, {"function": function, "explain": _explain})
    made.__defaults__ = function.__defaults__
    made.__kwdefaults__ = None if packs else function.__kwdefaults__
    made._torchdynamo_inline = function  # torch.compile traces the function itself
    return functools.update_wrapper(made, function)  # type: ignore[return-value]


def _explain(error: Exception, function: Callable[..., Any], /, *args: Any, **options: Any) -> NoReturn:
    """Raises the error of a failed call, or one that names the first argument that its annotation does not allow, that
    has more than 64 bits, that no kernel can read, or, if the error names none, whose rank does not fit.
    """
    signature = inspect.signature(function)
    try:
        given = signature.bind_partial(*args, **options).arguments
    except TypeError:  # a function that takes more than its signature shows
        raise error from None
    rename(error, given.items())
    called, words = _name(function, given), re.findall(r"\w+", str(error))
    for name, value in given.items():
        parameter = signature.parameters[name]
        wanted = "Any" if parameter.kind in _PREFIX or parameter.annotation is parameter.empty else parameter.annotation
        kinds = [re.sub(r"\[.*\]", "", word) for word in re.split(r" \| (?![^\[]*\])", str(wanted))]
        ours = {kind: f"a {kind} of fi_core" for kind in kinds if _own_class(kind, function.__globals__)}
        named = str(error).startswith(name) and words[0] == name
        if named and (ours or isinstance(error, TypeError)):  # in words of our own
            break
        if not any(_matches(kind, value, function.__globals__) for kind in kinds):
            required = " or ".join({**_WORDS, **ours}.get(kind, kind) for kind in kinds)
            kind = type(value).__name__
            got = "None" if value is None else f"{'an' if kind[0] in 'aeio' else 'a'} {kind}"
            raise TypeError(f"{called}: {name} must be {required}; got {got}") from None
        members = dict(leaves(name, value)) if type(error) in _FOREIGN and isinstance(value, (tuple, list)) else {}
        if "[torch.Tensor" in str(wanted) or any(_matches("torch.Tensor", leaf) for leaf in members.values()):
            for place, leaf in members.items():
                if leaf is not None and not _matches("torch.Tensor", leaf):
                    raise TypeError(f"{called}: {place} must be a torch.Tensor; got a {type(leaf).__name__}") from None
        tensor: Any = value if type(error) in _FOREIGN and _matches("torch.Tensor", value) else None
        if "float" in kinds and tensor is not None and not unreadable(tensor):
            if tensor.numel() == 1 and tensor.is_floating_point():
                continue
            got = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise ValueError(
                f"{called}: {name} must be a number, or a float tensor of one element; got {got}"
            ) from error
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{called}: {name} must be an integer of 64 bits; got {value}") from None
    # A text of Python's or torch's own may have the name of an argument as a word: "tuple index out of range".
    if type(error) in _FOREIGN or not any(names(str(error), name) for name in given):
        _explain_tensors(error, function, given, called)
    if isinstance(error, UnsupportedError):
        _name_arguments(error, called, given)
    _name_caller(error, called, signature)
    raise error.with_traceback(None) if _is_explained(error) else error


def _is_explained(error: Exception) -> bool:
    """Whether the words of an error are ours, so that no frame is needed to understand it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    ours = torch_op.explain.__code__, torch_op.dispatch.__code__
    return isinstance(error, FiError) or (last is not None and last.tb_frame.f_code in ours)


def names(text: str, name: str) -> bool:
    """Whether a text of ours names an argument. `a` is an article as well."""
    return bool(re.search(rf"\b{name}\b" if name != "a" else r"\ba(:| must| has|, [a-z]\b| and [a-z]\b)", text))


def _name(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """The function as a caller knows it: a constructor by its class."""
    return type(given["self"]).__name__ if function.__name__ == "__init__" else function.__name__


def _name_arguments(error: Exception, called: str, given: Mapping[str, Any]) -> None:
    """A refused request has an operator and its fields; the user knows the function that was called and its tensors."""
    text = str(error).partition("\n  arguments: ")[0]  # of a function inside
    asked = re.match(r"(?:\w+: )?(\w+)\(", text)
    if asked and asked[1] in operators():
        tensors = (f"{n} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for n, x in _tensors(given).items())
        caller = "" if asked[1] == called else f"{called}: "
        error.args = (f"{caller}{text[asked.start(1) :]}\n  arguments: {', '.join(tensors)}",)


def _name_caller(error: Exception, called: str, signature: inspect.Signature) -> None:
    """Texts of kernels begin with the name of an operator, others of ours with an argument; the user knows the function
    that was called.
    """
    if error.args != (str(error),):
        return
    inner, colon, text = str(error).partition(": ")
    if colon and _is_callee(inner) and inner not in signature.parameters:
        error.args = (f"{called}: {text}",)
    elif type(error) in _PLAIN and re.split(r"\W", inner)[0] in signature.parameters:
        error.args = (f"{called}: {error}",)


def _is_callee(word: str) -> bool:
    """Whether a word is the name of an operator, or of a public function."""
    return word in operators() or any(name.endswith(f":{word}") for name in api.functions)


def _tensors(given: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a call by the places of `leaves`."""
    import torch

    found = (leaf for name, value in given.items() for leaf in leaves(name, value))
    return {place: value for place, value in found if isinstance(value, torch.Tensor)}


def _refuse_mixture(tensors: Mapping[str, Any], given: Mapping[str, Any], called: str, error: Exception) -> None:
    """Raises TypeError if fake tensors came together with others, or with those of another mode. Others may also be
    what the object holds since its plan.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    held = _tensors(getattr(given.get("self"), "__dict__", {}))
    fakes = {name: x for name, x in tensors.items() if isinstance(x, FakeTensor)}
    others = [x for x in (*tensors.values(), *held.values()) if not isinstance(x, FakeTensor)]
    modes = {id(x.fake_mode) for x in (*fakes.values(), *held.values()) if isinstance(x, FakeTensor)}
    if fakes and (len(modes) > 1 or any(x.layout is torch.strided for x in others)):
        names = ", ".join(fakes)
        raise TypeError(f"{called}: fake tensors cannot be mixed with others; got {names} of that kind") from error


def _refuse_shared(tensors: Mapping[str, Any], called: str) -> None:
    """Raises ValueError for a tensor that torch would write, whose elements share memory, or which shares it with
    another one.
    """
    for name, x in tensors.items():
        if any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride())):
            raise ValueError(
                f"{called}: {name} is written, so no two of its elements may share memory; got shape {list(x.shape)} "
                f"with strides {x.stride()}: pass a tensor of its own memory"
            ) from None
    for (name, x), (other, y) in itertools.combinations(tensors.items(), 2):
        if x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
            raise ValueError(f"{called}: {name} and {other} must not share memory: pass a tensor for each") from None


def _refuse_dtype(error: Exception, tensors: Mapping[str, Any], called: str) -> None:
    """Raises TypeError for a tensor whose dtype a function of torch lacks."""
    found = _LACKS_DTYPE.search(str(error))
    lacking = found[0].lower() if found else ""
    for name, x in tensors.items():
        dtype = str(x.dtype).removeprefix("torch.")
        if dtype in lacking:
            raise TypeError(f"{called}: {name} must have another dtype than {dtype}") from error


def _explain_tensors(error: Exception, function: Callable[..., Any], given: Mapping[str, Any], called: str) -> None:
    """Raises the error that names a tensor which no kernel can read, whose values a call needs that has none, which has
    a dimension of 0 where a call divides by it, or whose rank the description does not have; else, of a wrong value,
    one with the shapes of all tensors.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException

    foreign = type(error) in _FOREIGN
    tensors = {name: x for name, x in _tensors(given).items() if foreign or name in given}
    for name, value in tensors.items():
        if not is_special(value) and (problem := unreadable(value)):
            raise TypeError(f"{called}: {name} must be a dense tensor with data; {problem}") from None
    if isinstance(error, DataDependentOutputException):
        special = [name for name, value in tensors.items() if is_special(value)]
        raise NotImplementedError(
            f"{called}: values of {', '.join(special)} shape the result, so data is required "
            "that a fake tensor does not have"
        ) from error
    if foreign:
        _refuse_mixture(tensors, given, called, error)
    if isinstance(error, ZeroDivisionError):
        for name, value in tensors.items():
            if 0 in value.shape:
                shape = list(value.shape)
                raise ValueError(f"{called}: {name}: every dimension must be 1 or more; got shape {shape}") from None
    if "refer to a single memory location" in str(error) or "refers to a single memory location" in str(error):
        _refuse_shared(tensors, called)
    _refuse_dtype(error, tensors, called)
    for name, value in tensors.items() if "that requires grad is being used in an in-place" in str(error) else ():
        if value.requires_grad:
            raise NotImplementedError(
                f"{called}: there is no backward, and {name} requires grad: call it under torch.no_grad(), or pass a "
                "detach()ed tensor"
            ) from None
    if isinstance(error, (RuntimeError, FiError, LookupError)) and type(error) is not IndexError:
        return  # of a device, or in words of our own
    trace = getattr(getattr(function, "fi_trace", None), "trace", None)
    templates = [template for template in getattr(trace, "templates", (trace,)) if template]
    inputs = [
        (entry.param or key, entry)
        for template in templates
        for key, entry in template.inputs.items()
        if isinstance(entry, Tensor) and entry.tuple_idx is None  # a tensor in place of a tuple has its own shape
    ]
    inner, _, rest = str(error).partition(": ")
    of_a_kernel = _is_callee(inner)
    says_more = of_a_kernel and "shape" not in rest.partition(";")[0]  # what it requires: not a shape
    for name, value in () if says_more else tensors.items():
        dims = [entry.dim_names for key, entry in inputs if key == name]
        if dims and value.ndim not in map(len, dims):
            forms = " or ".join(dict.fromkeys(f"[{', '.join(each)}]" for each in dims))
            got = tuple(value.shape)
            raise ValueError(f"{called}: {name}: {forms} is required; got shape {got}") from error
    if tensors and type(error) in (ValueError, IndexError):  # of a kernel that names what it derives from them
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items())
        text = rest if of_a_kernel else str(error)
        said = "a tensor has too few dimensions" if isinstance(error, IndexError) else text
        raise ValueError(f"{called}: {said}; got tensors of shapes {shapes}") from error


def _own_class(word: str, scope: Mapping[str, Any]) -> type | None:
    """A class of ours that an annotation names; it may have the name of another, as Mapping."""
    known = scope.get(word)
    return known if isinstance(known, type) and known.__module__.startswith("fi_core.") else None


def _matches(word: str, value: Any, scope: Mapping[str, Any] = {}) -> bool:
    """Whether a value is of an annotated type; true for types that are not known here. scope: of the annotation."""
    if word.startswith("torch."):
        import torch

        known = getattr(torch, word.removeprefix("torch."), object)
        return isinstance(value, known) or (known is torch.device and isinstance(value, (str, int)))
    ours = _own_class(word, scope)
    return isinstance(value, _TYPES.get(word, object) if ours is None else ours)
