"""Attention with a user's variant: its declaration and arguments, the units it is compiled in, and how they are run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from fi_core.attention.ops.decode import BATCH_DECODE
from fi_core.attention.ops.prefill import BATCH_PREFILL, Q_TILE, VARIANT_TILES
from fi_core.attention.ops.single import SINGLE_ATTENTION, attend
from fi_core.jit import base
from fi_core.runtime.build import sources
from fi_core.runtime.build.diagnose import USER_TEXT
from fi_core.runtime.dispatch import AUTO, Choice, Request, choose
from fi_core.runtime.launch.kernel import bind_artifacts, rehearse
from fi_core.runtime.lazy import torch
from fi_core.runtime.machine import Rehearsal, rehearsal, target_of
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.dtype import short_name
from fi_core.runtime.spec.op import Entry, Op, Unit
from fi_core.runtime.spec.target import Target
from fi_core.runtime.tensors import unreadable
from fi_core.utils import PosEncodingMode, canonicalize_torch_dtype, get_alibi_slopes

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


ROPE = PosEncodingMode.ROPE_LLAMA.value
_OPS = {op.name: op for op in (SINGLE_ATTENTION, BATCH_DECODE, BATCH_PREFILL)}
_FP32_ROWS = "f32"
_WIDE = 256  # head dims above take another kernel on CUDA cores
_ON_CUDA_ONLY = {"half", "__half", "nv_bfloat16", "__nv_bfloat16"}
Made = TypeVar("Made")


class Form(NamedTuple):
    """An implementation on CUDA that a variant is compiled into.

    axes: of its unit. entry: the kernel entry that fits the head dims; a unit that has combine_chunks keeps it, too.
    """

    implementation: str
    entry: str
    axes: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class CustomAttention:
    """An attention op with a variant, for the types and head dims that it was declared with, and its files."""

    op: Op
    uri: str
    variant: Variant
    forms: tuple[Form, ...]  # in order of preference
    facts: tuple[tuple[str, object], ...]  # of a request for it
    dtypes: tuple[Any, ...]  # q, kv, output
    head_dims: tuple[int, int]
    rope: bool
    calls: dict[Any, Callable[..., None]]

    @property
    def name(self) -> str:
        return f"{self.op.name}_{self.uri}"

    def form(self, target: Target, implementation: str = "") -> Form:
        """The form for an implementation, or the first one that the target supports. Raises UnsupportedError."""
        facts = Request.of(self.op, target, dict(self.facts)).facts()
        *first, last = self.forms
        for form in self.forms if implementation else first:
            if form.implementation == implementation:
                return form
            if not implementation and not self.op.implementation(form.implementation).refusals(facts):
                return form
        choose(Request.of(self.op, target, dict(self.facts), last.implementation))  # raises the reasons
        return last

    def unit(self, form: Form) -> Unit:
        """The unit of the op with the variant."""
        unit = self.op.implementation(form.implementation).unit
        assert unit is not None
        made = unit(dict(form.axes))
        kept = (entry for entry in made.entries if entry.name in (form.entry, "combine_chunks"))
        return made._replace(entries=tuple(kept), variant=self.variant.text())

    def artifacts(self, target: Target, implementation: str = "") -> tuple[Artifact, ...]:
        """The host module and, on CUDA, the device binary. Raises NotImplementedError for types that a CPU does not
        support.
        """
        if target.kind == "cuda":
            form = self.form(target, implementation)
            text = sources.device_unit(self.name, self.unit(form))
            image = Artifact(f"{self.name}_{form.implementation}_{target}", "cubin", target, text)
            return sources.host_module(self.op, "cuda"), image
        only = [name for name, kind in self.variant.tensors if kind in _ON_CUDA_ONLY]
        if only:
            raise NotImplementedError(f"{', '.join(only)}: 16-bit floats of a variant are supported on CUDA only")
        # For one level, and not with all that -O3 tries: 1.0 instead of 2.4 s to compile (2-core x86-64).
        flags = ("-O1", "-DFI_ONE_LEVEL")
        return (sources.variant_module(self.op, self.name, self.variant.text(), flags),)

    def backend(self, device: torch.device) -> str:
        """The backend of requests: "auto", or the only form."""
        return "auto" if self.forms[1:] or device.type == "cpu" else self.forms[0].implementation

    def on(self, device: torch.device, implementation: str = "") -> Callable[..., Any]:
        """The op on a device as a function with the variant's arguments behind its own, compiled at the first call.

        implementation: on CUDA, of one of the forms; default: the first that the device supports. Raises CompileError.
        """
        if rehearsal():
            return self.bind(device, implementation)
        call = self.calls.get((device, implementation))
        if call is None:
            call = self.calls[device, implementation] = self.bind(device, implementation)
        return call

    def bind(self, device: torch.device, implementation: str = "") -> Callable[..., Any]:
        """As `on`, which keeps it."""
        target = target_of(device)
        artifacts = self.artifacts(target, implementation)
        entries: tuple[Entry, ...] = ()
        if target.kind == "cuda":
            form = self.form(target, implementation)
            entries, implementation = self.unit(form).entries, form.implementation
        if shown := rehearsal():
            choice = choose(Request.of(self.op, target, dict(self.facts), implementation or AUTO))
            return _rehearsed(shown, choice, entries, artifacts)
        return bind_artifacts(self.name, artifacts, entries, device.index or 0).run

    def declares(self, tensor: str) -> bool:
        return any(name == tensor for name, _ in self.variant.tensors)

    def launch(
        self, plan: Any, q: torch.Tensor, given: Sequence[Any], known: Mapping[str, Any], *scales: Any, **where: str
    ) -> VariantCall:
        """For the run of a plan: the op with the variant's arguments.

        given: positional arguments after the cache. known: tensors that are never given, except maybe_alibi_slopes.
        where: `implementation` of `on`. scales: q_scale, k_scale and sinks of run, which a variant must implement
        itself (NotImplementedError).
        """
        for name, scale in zip(("q_scale", "k_scale", "sinks"), scales):
            if scale is not None:
                raise NotImplementedError(f"{name}: declare it as an argument of the variant, whose logits are its own")
        scale, items = q.shape[2] ** -0.5 if plan.sm_scale is None else plan.sm_scale, getattr(plan, "items_len", 0)
        derived = derived_scalars(scale, plan.soft_cap, plan.rope_scale, plan.rope_theta, items)
        return VariantCall(self.on(q.device, **where), self.extras(q, given, known, derived))

    def extras(
        self, q: torch.Tensor, given: Sequence[Any], known: Mapping[str, Any], derived: Mapping[str, float]
    ) -> list[Any]:
        """`Variant.arguments`, with ALiBi's slopes among those known."""
        if self.declares("maybe_alibi_slopes"):
            known = {**known, "maybe_alibi_slopes": alibi_slopes(q.shape[1], q.device)}
        return self.variant.arguments(given, known, derived, q.device)

    def encoding(self, plan: Any) -> int:
        """The position encoding of a run: that of the declaration, else that of the plan."""
        return ROPE if self.rope else plan.pos_encoding

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        given: Sequence[Any],
        kv_layout: str,
        causal: bool,
        window_left: int,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """One request; q `[heads, d]` or `[qo_len, heads, d]`."""
        if self.op.name != "single_attention":
            raise ValueError(f"jit_module: one for a single request is required; got one for {self.op.name}")
        for name, x, ranks in (("q", q, (2, 3)), ("k", k, (3,)), ("v", v, (3,))):
            if x.ndim not in ranks:
                raise ValueError(
                    f"{name}: {' or '.join(map(str, ranks))} dimensions are required; got {tuple(x.shape)}"
                )
        self.check(q.dtype, k.dtype, self.dtypes[2], q.shape[-1], v.shape[-1])
        extras = self.variant.arguments(given, {}, {}, q.device)
        few = bool(dict(self.forms[0].axes)["few"])
        call, encoding = VariantCall(self.on(q.device), extras), "ROPE_LLAMA" if self.rope else "NONE"
        options: dict[str, Any] = {"kv_layout": kv_layout, "window_left": window_left, "return_lse": return_lse}
        options |= {"out_dtype": self.dtypes[2], "splits": few, "causal": causal, "variant": call}
        return attend(q, k, v, pos_encoding_mode=encoding, **options)

    def check(self, q: Any, kv: Any, out: Any, head_dim_qk: int, head_dim_vo: int) -> None:
        """Raises ValueError if a call or a plan differs from the declaration of the module."""
        for name, got, wanted in (
            ("dtype_q", q, self.dtypes[0]),
            ("dtype_kv", kv, self.dtypes[1]),
            ("dtype_o", out, self.dtypes[2]),
            ("head_dim_qk", head_dim_qk, self.head_dims[0]),
            ("head_dim_vo", head_dim_vo, self.head_dims[1]),
        ):
            if got != wanted:
                raise ValueError(f"{name}: {self.uri} was made for {wanted}; got {got}")


def _rehearsed(
    shown: Rehearsal, choice: Choice, entries: tuple[Entry, ...], files: tuple[Artifact, ...]
) -> Callable[..., None]:
    """The function that a rehearsed call of an op with a variant takes: it is compiled into these entries and files."""

    def call(*values: Any) -> None:
        if not shown.has_launcher(choice.request.op):
            shown.calls.append((choice, None))
        elif shown.target.kind == "cuda":
            kernel = rehearse(choice.spec, shown.multiprocessors, shown.shared_limit, entries)
            shown.note(choice, kernel.run(*values))
        else:
            shown.note(choice)
        shown.files[choice] = files

    return call


def derived_scalars(
    sm_scale: float, soft_cap: float = 0.0, rope_scale: float = 1.0, rope_theta: float = 1e4, items: int = 0
) -> dict[str, float]:
    """The scalars that a caller may leave out at the end."""
    rope = {"rope_rcp_scale": 1.0 / rope_scale, "rope_rcp_theta": 1.0 / rope_theta}
    ones = dict.fromkeys(("scale_q_scalar", "scale_k_scalar", "scale_v_scalar"), 1.0)
    return {"logits_soft_cap": soft_cap, "sm_scale": sm_scale, "token_pos_in_items_len": items, **rope, **ones}


@dataclass(frozen=True)
class VariantModule(base.JitSpec, Generic[Made]):
    """The files of one attention op with a variant, or of batch prefill and of batch decode, as the wrappers for mixed
    batches compile them from jit_args. Loaded, it is a CustomAttention, or two, which compile for other devices later.
    """

    made: Made

    def load(self) -> Made:
        self._load_modules()
        return self.made


def variant_module(
    op: str,
    uri: str,
    dtypes: Sequence[Any],
    head_dims: tuple[int, int],
    declared: tuple[Any, ...],
    pos_encoding_mode: int,
    few: bool = False,
    fp8_enabled: bool = False,
    backend: str = "fa2",
) -> VariantModule[CustomAttention]:
    """The module of an op; `declared` are the four lists, variant_name and variant_decl. It does not compile."""
    if not re.fullmatch(r"[\w.-]{1,120}", uri):
        raise ValueError(f"uri: 1 to 120 letters, digits and _.- are required, as it names files; got {uri!r}")
    if fp8_enabled:
        raise NotImplementedError("fp8_enabled: fp8 products are not supported in variants; pass 16-bit q, or fp8 keys")
    types = tuple(canonicalize_torch_dtype(dtype) for dtype in dtypes)
    q, kv = short_name(types[0]), short_name(types[1])
    fp32, wide = q == _FP32_ROWS, max(head_dims) > _WIDE
    if op == "single_attention":
        few = fp32 or (few and not wide)
        axes: dict[str, object] = {"few": few, "q": q, "kv": kv}
        implementation = "cuda_core" if few else "mma_sm80"
        entry = f"single_attention_cuda_core{'_wide' * wide}" if few else "single_attention_mma"
    elif op == "batch_decode":
        axes = {"q": q, "kv": kv, "head_dim": 0, "split_tables": False}
        implementation, entry = "cuda_core", "batch_decode_cuda_core_wide" if wide else "batch_decode_cuda_core"
    else:
        axes = {"q": q, "kv": kv, "head_dim": 0, "soft_cap": False, "split_tables": False}
        implementation, entry = "mma_sm80", "batch_prefill_mma"
    forms = [Form(implementation, entry, tuple(axes.items()))]
    if op == "batch_prefill" and backend != "fa2":
        on_hopper = q == kv and q in ("f16", "bf16") and VARIANT_TILES.get(head_dims[0], (0, 0))[1] == head_dims[1]
        hopper = {**axes, "head_dim": head_dims[0], "variant": True}
        if on_hopper and types[2] is types[0] and pos_encoding_mode != ROPE:
            forms.insert(0, Form("wgmma_sm90", "batch_prefill_wgmma", tuple(hopper.items())))
        elif backend == "fa3":
            raise ValueError(
                "backend: fa3 requires q, k, v and output of one 16-bit dtype, head dims "
                f"{', '.join(f'{qk}/{vo}' for qk, vo, *_ in VARIANT_TILES.values())} and no rotation; got "
                f"{q}, {kv}, {types[2]} and {head_dims[0]}/{head_dims[1]}"
            )
    forms = forms[:1] if backend == "fa3" else forms
    found = _OPS[op]
    for name in ("q", "kv"):
        if axes[name] not in found.axes[name]:
            names = ", ".join(map(str, found.axes[name]))
            raise ValueError(f"dtype_{name}: one of {names} is required; got {axes[name]}")
    facts: dict[str, object] = {"q": q, "kv": kv, "head_dim_qk": head_dims[0], "head_dim_vo": head_dims[1]}
    if op == "single_attention":
        facts["qo_len"] = 1 if few else Q_TILE
    own = found, uri, Variant.of(declared[:4], *declared[4:]), tuple(forms), tuple(facts.items())
    made = CustomAttention(*own, types, head_dims, pos_encoding_mode == ROPE, {})
    artifacts = dict.fromkeys(a for target in base.default_targets() for a in made.artifacts(target))
    module = VariantModule(made.name, tuple(artifacts), made)
    base.jit_spec_registry.register(module)
    return module


def custom_attention(jit_module: Any) -> CustomAttention:
    """The `jit_module` argument of a function, checked. Raises TypeError."""
    if not isinstance(jit_module, CustomAttention):
        raise TypeError(
            "jit_module: what build_and_load() of a gen_customize_..._module gives is required; got "
            f"{type(jit_module).__name__}"
        )
    return jit_module
