"""JitSpecs of fi's own operators: `gen_module(word)` for a family ("norm") or an operator ("rmsnorm").

FlashInfer's modules of generators (`jit.gemm`, `jit.norm`, ...) are this module too, as `compat.renamed` lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fi_core import aot
from fi_core.jit import base
from fi_core.registry import operator, ops
from fi_core.runtime import dispatch
from fi_core.runtime.build import sources
from fi_core.runtime.dispatch import Request
from fi_core.runtime.errors import missing_attribute
from fi_core.runtime.spec.dtype import short_name
from fi_core.runtime.spec.op import Op, Spec
from fi_core.runtime.spec.target import Target

# FlashInfer's names of modules, and the families and operators here that have their kernels.
_GROUPS = {
    "cascade": ("merge_state", "merge_states"),
    "comm_alltoall": ("moe_dispatch", "moe_combine"),
    "cutlass_fused_moe_sm90": ("fused_moe",),
    "dcp_alltoall": ("all_to_all",),
    "dsv3_fused_routing": ("moe_route",),
    "dsv3_router_gemm": ("gemm",),
    "fp4_kv_dequantization": ("block_dequantize",),
    "fp4_kv_quantization": ("append_nvfp4_kv_cache",),
    "fp4_quantization_sm90": ("block_quantize", "block_scale_interleave"),
    "fp8_blockscale_gemm_sm90": ("gemm",),
    "gemm_sm90": ("gemm",),
    "hash_topk": ("moe_route",),
    "moe_alltoall": ("moe_dispatch", "moe_combine"),
    "moe_utils": ("moe_sort", "moe_gather", "moe_activation", "moe_finalize"),
    "tinygemm2": ("gemm",),
    "trtllm_comm": ("all_reduce",),
    "trtllm_mnnvl_comm": ("all_reduce",),
    "vllm_comm": ("all_reduce",),
}
# The parameter of a module that FlashInfer gives one, and its values that mean something here.
_OPTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "cutlass_fused_moe_sm90": ("use_fast_build", (False, True)),  # of its templates; here nothing depends on it
    "dsv3_fused_routing": ("backend", ("default",)),
    "moe_alltoall": ("target", ("legacy",)),
}
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


def gen_module(word: str, *given: Any, targets: Iterable[Target] | None = None, **axes: Any) -> base.JitSpec:
    """Returns the prebuilt configurations of a family or an operator as one spec; it compiles nothing.

    Args:
        word: a family, an operator, or FlashInfer's name of a module with kernels of some.
        *given: the parameter that FlashInfer gives few of its modules, such as target of "moe_alltoall"; by name too.
        targets: `base.default_targets()` if None.
        **axes: keeps the configurations with these values of the operator's axes; a dtype is a torch dtype or its short
            name.

    Raises:
        ValueError: word is unknown, a parameter has another value, or no configuration is left.
        TypeError: there are more parameters.
    """
    parameter, accepted = _OPTIONS.get(word, ("", ()))
    if len(given) > bool(parameter):
        raise TypeError(f"gen_{word}_module: {parameter or 'no positional parameter'} is expected; got {given}")
    for value in (*given, *([axes.pop(parameter)] if parameter in axes else ())):
        if value not in accepted:
            raise ValueError(f"{parameter}: {' or '.join(map(repr, accepted))} is required; got {value!r}")
    names = {word, *_GROUPS.get(word, ())}
    chosen = [op for op in ops().values() if not names.isdisjoint((op.family, op.name))]
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


def module_of_requests(
    name: str, wanted: Mapping[str, Sequence[Mapping[str, Any]]], targets: Iterable[Target] | None
) -> base.JitSpec:
    """All implementations that support the requests: for each op the fields of its requests. Their values name the
    module.

    Raises:
        UnsupportedError: no implementation supports a request.
    """
    places = base.default_targets() if targets is None else tuple(targets)
    requests = [Request.of(ops()[op], target, f) for op, fields in wanted.items() for f in fields for target in places]
    for request in requests:
        dispatch.choose(request)  # refuses with the reasons
    values = [f"{field}_{value}" for fields in wanted.values() for f in fields for field, value in f.items()]
    made = OpModule.of(
        "_".join([name, *dict.fromkeys(values)]),
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


def generators() -> dict[str, str]:
    """The names `gen_<word>_module`, and the word of each."""
    return {f"gen_{word}_module": word for word in words()}


@functools.cache
def _generator(word: str) -> Callable[..., base.JitSpec]:
    return functools.partial(gen_module, word)


def __getattr__(name: str) -> Any:
    known = generators() if name.startswith("gen_") else {}
    if name in known:
        return _generator(known[name])
    raise missing_attribute(__name__, name, known)
