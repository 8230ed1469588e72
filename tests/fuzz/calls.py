"""Valid calls of every public function and wrapper, which the fuzz makes hostile."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

import fi_core
from families import test_cudnn as cudnn
from families import test_decode_block_tables as tables
from families import test_decode_tables_plan as tables_plan
from families import test_variants as variants
from families import wrapper_session
from families.harness import rand
from families.paged import paged
from families.prefill_batch import batch, workspace
from families.test_descriptions import DESCRIBED
from fi_bench.startup.calls import arguments as first_calls
from fi_core.observe import api
from fi_core.observe.trace import Described, TraceTemplate
from fuzz import comm_calls, composed_calls, moe_calls

Arguments = dict[str, Any]  # by parameter; the rest of `*args` is one tuple
OF_ADDRESSES = {"linear_attention.mamba_ops.replayssm_materialize"}  # for the user to check: composed_calls has a call


class Hook(Protocol):
    """Makes a call in place of the scenario. planned: what its object holds of the arguments that a reference takes."""

    def __call__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        template: TraceTemplate | None = None,
        planned: Arguments | None = None,
    ) -> Any: ...


class Scenario(NamedTuple):
    """`start(hook, seed)` makes its calls through the hook, with inputs of the seed. several: more than one call."""

    name: str
    start: Callable[[Hook, int], Any]
    several: bool = False


def invoke(function: Callable[..., Any], arguments: Arguments) -> Any:
    """The call with arguments by parameter."""
    parameters = inspect.signature(function).parameters.values()
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    if rest is None:
        return function(**arguments)
    before = list(arguments)[: list(arguments).index(rest)] if rest in arguments else []
    after = {name: value for name, value in arguments.items() if name not in (*before, rest)}
    return function(*(arguments[name] for name in before), *arguments.get(rest, ()), **after)


def bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """Arguments by parameter."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def _public(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a user calls: the marked function of the same name in its module; a method stays."""
    return getattr(sys.modules[function.__module__], function.__name__, function)


def _described(found: Described) -> Scenario:
    template = found.template

    def start(hook: Hook, seed: int) -> Any:
        sizes = (template.samples or ({},))[seed % len(template.samples or ((),))]
        arguments = template.sample(generator=seed, nasty=bool(seed & 1), **sizes)
        own = found.own(arguments)
        planned = {name: value for name, value in arguments.items() if name not in own}
        return hook(_public(found.bind(arguments)), own, template, planned)

    return Scenario(":".join((found.function.__qualname__, *template.tags)), start)


def _plain(name: str, function: Callable[..., Any], make: Callable[[], tuple[Any, ...] | Arguments]) -> Scenario:
    def start(hook: Hook, seed: int) -> Any:
        torch.manual_seed(seed)
        given = make()
        return hook(function, bound(function, given, {}) if isinstance(given, tuple) else given)

    return Scenario(name, start)


def _made(name: str, make: Callable[[], tuple[Callable[..., Any], Arguments]]) -> Scenario:
    """A call whose function knows the objects that its arguments are of."""

    def start(hook: Hook, seed: int) -> Any:
        torch.manual_seed(seed)
        return hook(*make())

    return Scenario(name, start)


def _of_a_group(name: str, make: Callable[[], tuple[Callable[..., Any], Arguments]]) -> Scenario:
    """A call that needs a process group of torch."""
    plain = _made(name, make)

    def start(hook: Hook, seed: int) -> Any:
        with comm_calls.group_of_one():
            return plain.start(hook, seed)

    return Scenario(name, start)


def _over_tables(options: Arguments, **more: Any) -> Arguments:
    return tables.arguments(paged([37, 3, 16], **options), **more)


def _output_given() -> tuple[Any, ...]:
    p = paged([64, 7, 30], heads=(8, 2), dim=128)
    shape = (3, 1, 8, 128)
    sinks = rand(2, 4, dtype=torch.float32, device="cpu")
    lens, room = p.seq_lens().view(3, 1).to(torch.uint32), tables.workspace("cpu")
    return (p.q.view(shape), *p.cache, p.block_tables(), lens, torch.empty(shape).half(), room, None, 2, 16, sinks)


def _one_call(contiguous: bool) -> Arguments:
    b = batch([(17, 17), (0, 0), (20, 20)], heads=(4, 4))
    k, v = b.ragged()
    given: Arguments = {
        "workspace_buffer": workspace("cpu"), "seq_lens": b.pool.seq_lens(), "max_q_len": 20, "max_kv_len": 20,
        "bmm1_scale": 0.1, "bmm2_scale": 0.5, "batch_size": 3, "cum_seq_lens_q": b.qo_indptr,
        "cum_seq_lens_kv": b.kv_indptr,
    }  # fmt: skip
    if contiguous:
        more = {"o_sf_scale": 1.0, "window_left": -1, "enable_pdl": False, "is_causal": True, "return_lse": True}
        return {"query": b.q, "key": k, "value": v, **given, **more}
    return {"qkv": (b.q, b.cache), "input_layout": "Q_PAGED_KV_NHD", "block_tables": b.pool.block_tables(), **given}


def _latent() -> Arguments:
    one = torch.float32
    return {
        "q_rope": rand(3, 16, 64, dtype=torch.bfloat16, device="cpu"),
        "k_rope": rand(3, 64, dtype=torch.bfloat16, device="cpu"),
        "q_nope": rand(3, 16, 512, dtype=torch.bfloat16, device="cpu"),
        "k_nope": rand(3, 512, dtype=torch.bfloat16, device="cpu"),
        "cos_sin_cache": rand(64, 64, dtype=one, device="cpu"), "pos_ids": torch.arange(3, dtype=torch.int32),
    }  # fmt: skip


def _custom(kind: str) -> tuple[Any, ...]:
    """A user's variant of attention: ALiBi."""
    lens = [(1 if kind == "decode" else 9, 70)]
    q, k, v = (
        rand(n, h, variants.DIM, dtype=torch.float16, device="cpu") for n, h in ((lens[0][0], 4), (70, 2), (70, 2))
    )
    example = variants.ALIBI
    module = variants.single(example, kind)
    return module, q[0] if kind == "decode" else q, k, v, *example.make(lens, variants.HEADS[0], "cpu"), *example.values


def _with_slopes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a user calls it who wrote the variant: what code of a user reads is for the user to check."""

    @functools.wraps(function)
    def call(*given: Any, **options: Any) -> Any:
        slopes = given[4] if len(given) > 4 else None
        q = given[1]
        heads = q.shape[-2] if isinstance(q, torch.Tensor) and not q.is_nested and q.ndim > 1 else 0
        if isinstance(slopes, torch.Tensor) and slopes.numel() < heads:
            raise ValueError(f"args: a slope for each of {heads} heads is required; got {slopes.numel()}")
        return function(*given, **options)

    return call


def _find(name: str) -> Callable[..., Any]:
    found: Any = fi_core
    for word in name.split("."):
        found = getattr(found, word)
    return found  # type: ignore[no-any-return]


def _examples() -> Iterator[Scenario]:
    """Functions whose description makes no inputs."""
    described = {found.function for found in DESCRIBED}
    for name, make in first_calls("cpu").items():
        if name not in OF_ADDRESSES and _find(name) not in described:
            yield _plain(name, _find(name), make)
    p = paged([40, 9], heads=(8, 2), dim=128, kv_layout="HND")
    b = batch([(7, 9), (3, 3)], heads=(8, 2), dims=(128, 128), kv_layout="HND")
    decode, quantized = fi_core.decode, {"kv_dtype": torch.float8_e4m3fn}
    hnd = {"kv_layout": "HND"}
    for name, function, make in (
        ("tables:HND", decode.trtllm_batch_decode_with_kv_cache, lambda: _over_tables(hnd, return_lse=True)),
        ("tables:several", decode.xqa_batch_decode_with_kv_cache, lambda: _over_tables({"q_len": 3})),
        ("tables:fp8", decode.xqa_batch_decode_with_kv_cache, lambda: _over_tables(quantized)),
        ("tables:output", fi_core.xqa, _output_given),
        ("ragged", fi_core.prefill.trtllm_ragged_attention_deepseek, lambda: _one_call(True)),
        ("one call", fi_core.trtllm_fmha_v2_prefill, lambda: _one_call(False)),
        ("latent", fi_core.rope.mla_rope_quantize_fp8, _latent),
        ("cudnn decode", fi_core.cudnn_batch_decode_with_kv_cache, lambda: cudnn.decode_arguments(p)),
        ("cudnn prefill", fi_core.prefill.cudnn_batch_prefill_with_kv_cache, lambda: {
            "q": b.q, "k_cache": b.cache[0], "v_cache": b.cache[1], **cudnn.prefill_arguments(b),
        }),
        ("custom decode", _with_slopes(decode.single_decode_with_kv_cache_with_jit_module), lambda: _custom("decode")),
        ("custom prefill", _with_slopes(fi_core.prefill.single_prefill_with_kv_cache_with_jit_module),
         lambda: _custom("prefill")),
        *moe_calls.calls(),
        *composed_calls.calls(),
    ):  # fmt: skip
        yield _plain(name, function, make)


@contextlib.contextmanager
def _intercepted(hook: Hook) -> Iterator[None]:
    """Every outermost call of a marked method, and every construction of a marked class, goes through the hook."""
    depth = 0
    undo: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str) -> None:
        original = inspect.getattr_static(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                if depth > 1:
                    return original(*args, **kwargs)
                return hook(original, bound(original, args, kwargs))
            finally:
                depth -= 1

        undo.append((owner, name, original))
        setattr(owner, name, call)

    owners = {f"{cls.__module__}:{cls.__qualname__}": cls for top in api.classes.values() for cls in top.__mro__}
    for name in api.functions:
        owner, _, method = name.rpartition(".")
        if owner in owners:
            patch(owners[owner], method)
    for cls in api.classes.values():
        if "__init__" in vars(cls):
            patch(cls, "__init__")
    patch(wrapper_session, "fast_decode_plan")
    patch(fi_core.decode, "trtllm_batch_decode_with_kv_cache")
    try:
        yield
    finally:
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)


def _session(name: str, session: Callable[[], Iterator[Callable[[], Any]]]) -> Scenario:
    def start(hook: Hook, seed: int) -> None:
        with _intercepted(hook):
            for run in session():
                run()

    return Scenario(f"session of {name}", start, several=True)


def _planned_tables() -> Iterator[Callable[[], Any]]:
    """Two layers of a step over block tables, which share its plan."""
    given = _over_tables({"q_len": 3}, return_lse=True)
    step = fi_core.decode.BlockTablesPlan(given["workspace_buffer"])
    step.plan(**tables_plan.plan_arguments(paged([37, 3, 16], q_len=3), given))
    for scale in (0.5, 1.0):
        yield lambda scale=scale: fi_core.decode.trtllm_batch_decode_with_kv_cache(
            **given | {"bmm1_scale": scale}, plan=step
        )


def _again() -> Iterator[Callable[[], Any]]:
    """The other names of run, and new buffers."""
    for session in (wrapper_session.decode, wrapper_session.prefill_paged, wrapper_session.prefill_ragged):
        run = next(session())
        yield run
        yield lambda run=run: run.wrapper.forward(**run.arguments, sm_scale=0.7)
        yield lambda run=run: run.wrapper.reset_workspace_buffer(
            workspace("cpu"), torch.empty(8 << 20, dtype=torch.uint8)
        )
    ranged = next(wrapper_session.ranges())
    yield lambda: ranged.wrapper.forward(**ranged.arguments)
    cascade = next(wrapper_session.cascade()).wrapper
    yield lambda: cascade.reset_workspace_buffer(workspace("cpu"), [torch.empty(8 << 20, dtype=torch.uint8)] * 3)


def scenarios() -> list[Scenario]:
    """All of them; each marked function and method is called by one."""
    w = wrapper_session
    sessions = {**w.SESSIONS, **w.COMPOSED, **w.COMPILED, "tables": _planned_tables, "other names": _again}
    return [
        *map(_described, DESCRIBED),
        *_examples(),
        *(_made(f"ranks:{name}", make) for name, make in comm_calls.CALLS.items()),
        *(_of_a_group(f"group:{name}", make) for name, make in comm_calls.CALLS_OF_A_GROUP.items()),
        *(_made(f"layer:{name}", make) for name, make in moe_calls.LAYERS.items()),
        *(_session(name, session) for name, session in sessions.items()),
    ]


def marked() -> dict[str, Callable[..., Any]]:
    """Every function and method of the API by name."""
    assert "fi_core" in sys.modules
    return {name: function for name, function in api.functions.items() if name.startswith("fi_core.")}
