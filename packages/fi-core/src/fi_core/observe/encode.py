"""Encodes arguments and results of a call as JSON and tensors for a dump, and decodes them; runs no code of a dump."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from fi_core.observe.api import class_of, name_of

if TYPE_CHECKING:
    import torch

Record = dict[str, Any]
_MAX_DEPTH = 20  # of containers in containers; deeper ones are described in words
_MAX_REPR = 1000


def encode(key: str, value: Any, tensors: dict[str, torch.Tensor], *, scratch: bool = False, depth: int = 0) -> Record:
    """A JSON description of a value; its tensors go into `tensors`, under the key or under key__<member>.

    A tensor that occurs twice is saved once. A value that a replay cannot make becomes its class and repr.
    scratch: tensors are workspaces, whose content is not saved.
    """
    import torch

    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        if not is_plain(value):
            return _opaque(value)
        if scratch:
            return {"type": "scratch", "details": details(value)}
        return {"type": "tensor", "key": _store(key, value, tensors)}
    if isinstance(value, torch.Generator):
        return {"type": "generator", "key": _store(key, value.get_state(), tensors), "device": str(value.device)}
    if isinstance(value, Enum):
        return {"type": "enum", "class": name_of(type(value)), "name": value.name}
    if value is None:
        return {"type": kind, "value": None}
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return {"type": base.__name__, "value": base(value)}
    if depth < _MAX_DEPTH:
        if type(value) in (list, tuple, torch.Size):
            items = [
                encode(f"{key}__{i}", item, tensors, scratch=scratch, depth=depth + 1) for i, item in enumerate(value)
            ]
            return {"type": "list" if isinstance(value, list) else "tuple", "items": items}
        if type(value) is dict and all(type(name) is str for name in value):
            members = {
                name: encode(f"{key}__{name}", item, tensors, scratch=scratch, depth=depth + 1)
                for name, item in value.items()
            }
            return {"type": kind, "items": members}
    if isinstance(value, (torch.dtype, torch.device)):
        return {"type": kind, "value": str(value).removeprefix("torch.")}
    return _opaque(value)


def encode_result(result: Any, tensors: dict[str, torch.Tensor]) -> Record:
    """Descriptions of the result of a call, member by member if it is a tuple."""
    parts = {f"result_{i}": item for i, item in enumerate(result)} if isinstance(result, tuple) else {"result": result}
    return {key: encode(key, value, tensors) for key, value in parts.items()}


def encode_self(value: Any) -> Record:
    """The description of the object that a method is called on: a replay looks it up by its id."""
    return {"type": "self", "class": name_of(class_of(value))}


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory whose content can be copied to the host."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_meta
    )


def details(tensor: torch.Tensor) -> Record:
    """Layout and place of a tensor. Its address tells a replay which arguments of which calls are the same memory."""
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype),
        "device": str(tensor.device),
        "requires_grad": tensor.requires_grad,
        "is_contiguous": tensor.is_contiguous(),
        "address": tensor.data_ptr(),
    }


def _store(key: str, value: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    """The key under which a tensor is saved: that of the same tensor, if it is there already."""
    for known, other in tensors.items():
        if other is value:
            return known
    while key in tensors:
        key += "_"
    tensors[key] = value
    return key


def _opaque(value: Any) -> Record:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<repr failed: {type(error).__name__}>"
    return {"type": "object", "class": name_of(type(value)), "repr": text[:_MAX_REPR]}


# Decoding


class Maker(Protocol):
    """Places the tensors of a replay on devices."""

    def device(self, recorded: str) -> str:
        """The device that takes the place of a recorded one."""
        ...

    def allocate(self, about: Record) -> torch.Tensor:
        """The tensor of a workspace, from its details."""
        ...


def decode(key: str, about: Record, tensors: Mapping[str, torch.Tensor], maker: Maker) -> Any:
    """The value of a description.

    Raises ValueError for a value that a dump cannot hold, LookupError for an enum of another package.
    """
    import torch

    kind = about["type"]
    if kind == "tensor":
        return tensors[about.get("key", key)]
    if kind == "scratch":
        return maker.allocate(about["details"])
    if kind in ("list", "tuple"):
        items = [decode(f"{key}__{i}", item, tensors, maker) for i, item in enumerate(about["items"])]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {name: decode(f"{key}__{name}", item, tensors, maker) for name, item in about["items"].items()}
    if kind == "enum":
        return _enum(about["class"], about["name"])
    if kind == "dtype":
        return dtype_of(about["value"])
    if kind == "device":
        return torch.device(maker.device(about["value"]))
    if kind == "generator":
        generator = torch.Generator(maker.device(about["device"]))
        generator.set_state(tensors[about["key"]].cpu())
        return generator
    if kind in ("NoneType", "bool", "int", "float", "str"):
        return about["value"]
    raise ValueError(f"{key}: an object of {about.get('class', kind)} cannot be made from a dump: {about.get('repr')}")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name, with or without "torch."; ValueError if torch has none of it."""
    import torch

    known = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    full = f"torch.{str(name).removeprefix('torch.')}"
    if full not in known:
        raise ValueError(f"dtype: a dtype of torch is required; got {name!r}")
    return known[full]


def check_device(name: str) -> str:
    """The device name that a dump holds; ValueError unless it is "cpu", "cuda" or "meta", with or without an index."""
    kind, _, index = str(name).partition(":")
    if kind not in ("cpu", "cuda", "meta") or (index and not index.isdecimal()):
        raise ValueError(f'device: "cpu" or "cuda[:index]" is required; got {name!r}')
    return str(name)


def _enums(base: type[Enum] = Enum) -> Iterator[type[Enum]]:
    """The enums that fi_core defines, as far as they are imported."""
    for cls in base.__subclasses__():
        if cls.__module__.partition(".")[0] == "fi_core":
            yield cls
        yield from _enums(cls)


def _enum(name: str, member: str) -> Enum:
    known = {name_of(cls): cls for cls in _enums()}
    if name not in known:
        raise LookupError(f"{name!r} is not an enum of fi_core")
    if member not in known[name].__members__:
        raise LookupError(f"{name!r} has no member {member!r}")
    return known[name].__members__[member]
