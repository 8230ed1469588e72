"""JitSpecs of fi's own operators: `gen_module(word)` for a family ("norm") or an operator ("rmsnorm")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fi_core import aot
from fi_core.jit import base
from fi_core.registry import operator, ops
from fi_core.runtime import dispatch
from fi_core.runtime.build import sources
from fi_core.runtime.dispatch import Request
from fi_core.runtime.spec.dtype import short_name
from fi_core.runtime.spec.op import Op, Spec
from fi_core.runtime.spec.target import Target
from fi_core.utils import PosEncodingMode

# FlashInfer's names of some operators of the attention family.
_GROUPS = {"cascade": ("merge_state", "merge_states")}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def words() -> tuple[str, ...]:
    """Returns the families and operators that `gen_module` accepts."""
    return tuple(dict.fromkeys((*(op.family for op in ops().values()), *_GROUPS, *ops())))


def specs_of(
    wanted: Iterable[Op], targets: Iterable[Target], keep: Callable[[Spec], bool] = lambda spec: True
) -> Iterator[Spec]:
    """Yields the prebuilt specs of the operators on the targets, each name once (a CPU module serves all axes)."""
    seen = set()
    places = tuple(targets)
    for op in wanted:
        for target in places:
            for spec in aot.specs(op, target):
                if keep(spec) and spec.name not in seen:
                    seen.add(spec.name)
                    yield spec


@dataclass(frozen=True)
class OpModule(base.JitSpec):
    """Specs of operators. `load` returns a namespace with one function per operator; arguments are as in its schema."""

    specs: tuple[Spec, ...]

    @classmethod
    def of(cls, name: str, specs: Iterable[Spec]) -> OpModule:
        kept = tuple(specs)
        return cls(name, tuple(dict.fromkeys(a for spec in kept for a in sources.artifacts(spec))), kept)

    def load(self) -> SimpleNamespace:
        self._load_modules()
        return SimpleNamespace(**{spec.op.name: operator(spec.op.name).function for spec in self.specs})


def view(spec: Spec) -> OpModule:
    """Returns one spec as a JitSpec."""
    return OpModule.of(spec.name, (spec,))


def gen_module(word: str, *, targets: Iterable[Target] | None = None, **axes: Any) -> base.JitSpec:
    """Returns the prebuilt configurations of a family or an operator as one spec; it compiles nothing.

    Args:
        word: a family or an operator.
        targets: `base.default_targets()` if None.
        **axes: keeps the configurations with these values of the operator's axes; a dtype is a torch dtype or its short
            name.

    Raises:
        ValueError: word is unknown, or no configuration is left.
    """
    chosen = [op for op in ops().values() if word in (op.family, op.name) or op.name in _GROUPS.get(word, ())]
    if not chosen:
        raise ValueError(f"word: must be a family or an operator, one of {', '.join(words())}; got {word!r}")
    return _module(word, chosen, targets, axes)


def gen_act_and_mul_module(
    act_func_name: str, act_func_def: str | None = None, *, targets: Iterable[Target] | None = None, **axes: Any
) -> base.JitSpec:
    """Returns `gen_module` of one activation; all activations are in the same files.

    Args:
        act_func_name: "silu", "gelu" or "gelu_tanh".
        act_func_def: must be None; a user's activation is a module of `gen_jit_spec`.
        targets: as for `gen_module`.
        **axes: as for `gen_module`.

    Raises:
        ValueError: act_func_name is unknown, act_func_def is given, or no configuration is left.
    """
    if act_func_def is not None:
        raise ValueError("act_func_def: must be None; write a module with gen_jit_spec")
    if act_func_name not in ACTIVATIONS:
        raise ValueError(f"act_func_name: must be one of {', '.join(ACTIVATIONS)}; got {act_func_name!r}")
    return _module(f"{act_func_name}_and_mul", [ops()["act_and_mul"]], targets, axes)


def gen_batch_decode_module(
    dtype_q: Any = None,
    dtype_kv: Any = None,
    dtype_o: Any = None,
    dtype_idx: Any = None,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    *,
    targets: Iterable[Target] | None = None,
    **axes: Any,
) -> base.JitSpec:
    """Returns the kernels of batch decode for one configuration; `gen_module("batch_decode")` without a dtype.

    Args:
        dtype_q, dtype_kv, dtype_o: torch dtypes.
        dtype_idx, use_sliding_window: without effect: kernels read int32 and take any window.
        head_dim_qk, head_dim_vo: head dimensions.
        pos_encoding_mode: code of `PosEncodingMode`.
        use_logits_soft_cap: whether scores are capped.
        targets: `base.default_targets()` if None.
        axes: as for `gen_module`; without effect if dtype_q is given.

    Raises:
        UnsupportedError: (a ValueError) No implementation supports it.
    """
    if dtype_q is None:
        return gen_module("batch_decode", targets=targets, **axes)
    fields = _attention_fields(dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, pos_encoding_mode)
    fields["soft_cap"] = use_logits_soft_cap
    return _attention("batch_decode", fields, targets)


def gen_batch_prefill_module(
    backend: str | None = None,
    dtype_q: Any = None,
    dtype_kv: Any = None,
    dtype_o: Any = None,
    dtype_idx: Any = None,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
    pos_encoding_mode: int = 0,
    use_sliding_window: bool = False,
    use_logits_soft_cap: bool = False,
    use_fp16_qk_reduction: bool = False,
    *,
    targets: Iterable[Target] | None = None,
    **axes: Any,
) -> base.JitSpec:
    """Returns the kernels of batch prefill for one configuration; `gen_module("batch_prefill")` without a backend.

    Args:
        backend: "auto", "fa2" or "fa3"; the module has the kernels of all.
        dtype_q, dtype_kv, dtype_o: torch dtypes.
        dtype_idx, use_sliding_window, use_fp16_qk_reduction: without effect: kernels read int32, take any window and
            accumulate in fp32.
        head_dim_qk, head_dim_vo: head dimensions.
        pos_encoding_mode: code of `PosEncodingMode`.
        use_logits_soft_cap: whether scores are capped.
        targets: `base.default_targets()` if None.
        axes: as for `gen_module`; without effect if backend is given.

    Raises:
        ValueError: backend is another word.
        UnsupportedError: (a ValueError) No implementation supports it.
    """
    if backend is None:
        return gen_module("batch_prefill", targets=targets, **axes)
    if backend not in ("auto", "fa2", "fa3"):
        raise ValueError(f"backend: auto, fa2 or fa3 is required; got {backend!r}")
    fields = _attention_fields(dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, pos_encoding_mode)
    fields["soft_cap"] = use_logits_soft_cap
    return _attention("batch_prefill", fields, targets)


def _attention_fields(q: Any, kv: Any, out: Any, head_dim_qk: Any, head_dim_vo: Any, encoding: int) -> dict[str, Any]:
    dtypes = {"q": short_name(q), "kv": short_name(kv), "out": short_name(out)}
    dims = {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo}
    return {**dtypes, **dims, "pos_encoding": PosEncodingMode(encoding).name}


def _attention(word: str, fields: dict[str, Any], targets: Iterable[Target] | None) -> base.JitSpec:
    """All implementations of an attention op that support a request."""
    places = base.default_targets() if targets is None else tuple(targets)
    requests = [Request.of(ops()[word], target, fields) for target in places]
    for request in requests:
        dispatch.choose(request)  # refuses with the reasons
    made = OpModule.of(
        "_".join([f"{word}_with_kv_cache", *(f"{field}_{value}" for field, value in fields.items())]),
        dict.fromkeys(spec for request in requests for spec in dispatch.specs(request)),
    )
    base.jit_spec_registry.register(made)
    return made


def _module(name: str, chosen: list[Op], targets: Iterable[Target] | None, axes: dict[str, Any]) -> base.JitSpec:
    wanted = {axis: short_name(value) if type(value).__name__ == "dtype" else value for axis, value in axes.items()}

    def keep(spec: Spec) -> bool:
        values = dict(spec.axes)
        return all(axis in values and values[axis] == value for axis, value in wanted.items())

    places = base.default_targets() if targets is None else tuple(targets)
    specs = tuple(specs_of(chosen, places, keep))
    if not specs:
        asked = ", ".join(f"{axis}={value}" for axis, value in wanted.items())
        raise ValueError(f"{name}({asked}): no configuration is prebuilt on {', '.join(map(str, places))}")
    made = OpModule.of("_".join([name, *(f"{axis}_{value}" for axis, value in wanted.items())]), specs)
    base.jit_spec_registry.register(made)
    return made
