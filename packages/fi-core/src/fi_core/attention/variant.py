"""Attention variants of users: their declaration, their text in a unit, and their arguments."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fi_core.runtime.build.diagnose import USER_TEXT
from fi_core.runtime.lazy import torch
from fi_core.runtime.tensors import unreadable
from fi_core.utils import get_alibi_slopes

# C types of additional tensors, and the torch dtypes whose elements they are.
TENSOR_TYPES = {
    "float": ("float32",),
    "double": ("float64",),
    "bool": ("bool",),
    "int": ("int32",),
    **dict.fromkeys(("half", "__half"), ("float16",)),
    **dict.fromkeys(("nv_bfloat16", "__nv_bfloat16"), ("bfloat16",)),
    **{f"{sign}int{bits}_t": (f"{sign}int{bits}",) for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "uint8_t": ("uint8", "bool"),
    "uint32_t": ("uint32", "int32"),
}
_FLOATS = ("double", "float")
_INTS = ("int64_t", "int32_t", "int", "uint32_t", "uint64_t", "bool")
_MOST = 64  # arguments; Extras of fi/host/arguments.h
_NAME = re.compile(r"[A-Za-z_]\w*")
_TAKEN = {"num_qo_heads", "num_kv_heads", "qo_len", "kv_len", "window_left", "set", "get_qo_len", "get_kv_len"}
# Words that occur only in FlashInfer's structs for Hopper.
_HOPPER_WORDS = re.compile(r"\b(GetAttentionUpdater|additional_params|MainloopParams|BlockCoord)\b")
# What kernels call of a struct, by the macros or by the names of the functions; and the functions that a text defines.
_HOOKS = re.compile(r"\b(REGISTER_[A-Z_]+|LogitsTransform|LogitsMask|update_m_d|OutputTransform)\b")
_FUNCTION = re.compile(r"\b(?!(?:if|for|while|switch)\b)(\w+)\s*\([^(){};]*\)\s*(?:const\s*)?\{")


@dataclass(frozen=True)
class Variant:
    """A struct in CUDA C++, and the pointers and numbers that it reads: `(name, C type)` each."""

    name: str
    declaration: str
    tensors: tuple[tuple[str, str], ...]
    scalars: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, tensors_and_scalars: Sequence[Sequence[str]], name: str, declaration: str) -> Variant:
        """Checks what the user wrote: names and types of tensors, and of scalars.

        Raises ValueError, also for a text without hooks whose functions nothing calls, or NotImplementedError for a
        struct of the Hopper form.
        """
        tensor_names, tensor_types, scalar_names, scalar_types = tensors_and_scalars
        tensors = _pair("additional_tensor", tensor_names, tensor_types, tuple(TENSOR_TYPES))
        scalars = _pair("additional_scalar", scalar_names, scalar_types, (*_FLOATS, *_INTS))
        names = [each for each, _ in (*tensors, *scalars)]
        twice = sorted({each for each in names if names.count(each) > 1})
        if twice:
            raise ValueError(f"additional_tensor_names, additional_scalar_names: {', '.join(twice)} is declared twice")
        if len(names) > _MOST:
            raise ValueError(f"additional_tensor_names, additional_scalar_names: at most {_MOST}; got {len(names)}")
        if not re.fullmatch(r"[A-Za-z_][\w:<>, ]*", name):
            raise ValueError(f"variant_name: the name of the struct in variant_decl is required; got {name!r}")
        if found := _HOPPER_WORDS.search(declaration):
            raise NotImplementedError(
                f"variant_decl: {found[0]} belongs to structs written for backend fa3, which are not supported; write "
                "the struct on AttentionVariantBase, with its constructor (params, batch_idx, smem_ptr), and pass "
                'backend="fa2"'
            )
        own = [] if _HOOKS.search(declaration) else _FUNCTION.findall(declaration)
        for function in sorted({*own} - {*re.findall(r"\bstruct\s+(\w+)", declaration)}):
            if len(re.findall(rf"\b{function}\s*\(", declaration)) == 1:
                raise ValueError(
                    f"variant_decl: a hook such as REGISTER_LOGITS_TRANSFORM is required; got {function}(), which no "
                    "kernel calls"
                )
        return cls(name, declaration, tensors, scalars)

    def text(self) -> str:
        """The text before a kernel's header in a unit: the arguments, then the user's text with its line numbers."""
        members = [f"  alignas(8) {kind}* {name};" for name, kind in self.tensors]
        members += [f"  alignas(8) {kind} {name};" for name, kind in self.scalars]
        before = ('#include "fi/attention/custom_variant.h"', "namespace fi {", "struct VariantArguments {")
        after = ("};", "}  // namespace fi", "using namespace flashinfer;", f'#line 1 "{USER_TEXT}"', self.declaration)
        kernel = f"#define FI_VARIANT CustomVariant<::{self.name.removeprefix('::')}, VariantArguments>"
        return "\n".join((*before, *members, *after, '#line 1 "unit"', kernel))

    def arguments(
        self, given: Sequence[Any], known: Mapping[str, Any], derived: Mapping[str, float], device: torch.device
    ) -> list[Any]:
        """The values of all tensors and scalars, in the order of declaration.

        Args:
            given: what the caller passed.
            known: tensors that are never passed.
            derived: scalars for the end of the list, if `given` ends before them.
            device: the device of q.

        Raises:
            TypeError: names the argument.
            ValueError: names the argument.
        """
        rest = list(given)
        found: list[Any] = []
        for name, kind in self.tensors:
            given_now = name not in known and rest and (rest[0] is None or hasattr(rest[0], "data_ptr"))
            value = rest.pop(0) if given_now else known.get(name)
            found.append(self._tensor(name, kind, value, device))
        if len(rest) > len(self.scalars):
            raise TypeError(
                f"{self.name}: after q, k and v {self._expected(known)} are taken; got {len(given)} arguments"
            )
        for at, (name, kind) in enumerate(self.scalars):
            if at < len(rest):
                found.append(_scalar(name, kind, rest[at]))
            elif name in derived:
                found.append(_scalar(name, kind, derived[name]))
            else:
                raise ValueError(
                    f"{name}: the scalar ({kind}) is missing; after q, k and v pass {self._expected(known)}"
                )
        return found

    def _expected(self, known: Mapping[str, Any]) -> str:
        names = [name for name, _ in self.tensors if name not in known] + [name for name, _ in self.scalars]
        return ", ".join(names) or "no further arguments"

    def _tensor(self, name: str, kind: str, value: Any, device: torch.device) -> Any:
        if value is None:
            if name.startswith("maybe"):
                return None
            raise ValueError(f"{name}: the tensor ({kind}*) is missing; pass it after q, k and v")
        if problem := unreadable(value):
            raise TypeError(f"{name}: a dense tensor with data is required; {problem}")
        if str(value.dtype).removeprefix("torch.") not in TENSOR_TYPES[kind]:
            wanted = " or ".join(TENSOR_TYPES[kind])
            raise TypeError(f"{name}: declared {kind}*, so dtype {wanted} is required; got {value.dtype}")
        if value.device != device:
            raise ValueError(f"{name}: a tensor on {device}, as q is, is required; got {value.device}")
        if not value.is_contiguous():
            raise ValueError(
                f"{name}: the variant gets its address alone, so it must be contiguous; call .contiguous()"
            )
        if value.data_ptr() % value.element_size():
            raise ValueError(f"{name}: an address at a multiple of its element size is required; call .clone()")
        return value


def _pair(what: str, names: Sequence[str], types: Sequence[str], allowed: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if len(names) != len(types):
        raise ValueError(
            f"{what}_dtypes: one for each of {what}_names is required, {len(names)}; got {len(types)}: {list(types)}"
        )
    pairs = []
    for name, kind in zip(names, types):
        if not _NAME.fullmatch(name) or name in _TAKEN:
            raise ValueError(f"{what}_names: names of C++ that params does not have itself; got {name!r}")
        plain = kind.replace("const ", "").replace("std::", "").rstrip("* ").strip()
        if plain not in allowed:
            raise ValueError(f"{what}_dtypes: {name} must be one of {', '.join(allowed)}; got {kind!r}")
        pairs.append((name, plain))
    return tuple(pairs)


def _scalar(name: str, kind: str, value: Any) -> Any:
    """A number as its 8 bytes are packed: an integer, or a float for double."""
    import struct

    wanted = int if kind in _INTS else (int, float)
    if not isinstance(value, wanted):
        number = "an integer" if kind in _INTS else "a number"
        raise TypeError(f"{name}: declared {kind}, so {number} is required; got {type(value).__name__}")
    if kind == "float":
        return struct.unpack("<i", struct.pack("<f", value))[0]
    return float(value) if kind == "double" else int(value)


@functools.cache
def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The ALiBi slopes of the kernels, for `maybe_alibi_slopes`."""
    return get_alibi_slopes(heads).to(device)


class VariantCall(NamedTuple):
    """The function that an operator calls instead of its own kernels, and the arguments after those of the op."""

    call: Callable[..., None]
    extras: list[Any]
