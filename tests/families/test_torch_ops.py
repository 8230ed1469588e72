"""torch.ops.fi_core.*: every op under torch's tracers, modes, transforms and kinds of tensors."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import _neg_view
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fi_core
from families.harness import FP8
from fi_bench.startup.calls import arguments as arguments_of
from fi_core.gemm.ops import gemm
from fi_core.registry import load, ops, supports
from fi_core.runtime.launch.operator import operators
from fi_core.runtime.resolve import checks
from fi_core.runtime.spec.arguments import Argument


class Recorder(TorchDispatchMode):
    """Keeps the arguments of the first call of each op of fi."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "fi_core":
            name = func._schema.name.partition("::")[2]
            defaults = [a.default for a in ops()[name].parsed[len(args) :]]
            self.seen.setdefault(name, (*copied(args), *defaults))
        return func(*args, **(kwargs or {}))


def copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same call on other memory; tensors that are one object stay one object."""
    copies = {id(a): a.clone() for a in arguments if isinstance(a, torch.Tensor)}
    return tuple(copies.get(id(a), a) for a in arguments)


@pytest.fixture(scope="module")
def calls() -> dict[str, tuple[Any, ...]]:
    """The arguments of one launch per op."""
    load()
    with Recorder() as recorder:
        for name, arguments in arguments_of("cpu").items():
            function: Any = fi_core
            for word in name.split("."):
                function = getattr(function, word)
            function(*arguments())
    return recorder.seen


# Functions of a second form of an op, or of Hopper alone, which no call of the sample reaches; and ops whose tensors
# lie in a workspace that ranks share, of which a tracer cannot make copies; those of functions of keywords alone; one
# that takes addresses, and one whose numbers are expanded, which a copy is not.
NOT_IN_SAMPLE = {
    "checkpointing_ssu", "moe_combine", "moe_dispatch", "moe_experts", "moe_few_tokens", "moe_gated_gemm",
    "qk_rmsnorm_rope", "replayssm_materialize", "rmsnorm_block_quant",
}  # fmt: skip
EACH_OP = pytest.mark.parametrize("name", sorted(set(ops()) - NOT_IN_SAMPLE))


class Call:
    """One call of an op: as a function of its tensors, in order, which returns what the op writes."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, copied(arguments)
        self.op, self.function = ops()[name], load()[name].function
        self.names = [a.name for a, v in zip(self.op.parsed, arguments) if isinstance(v, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [a for a in copied(self.arguments) if isinstance(a, torch.Tensor)]

    def with_tensors(self, tensors: Any) -> list[Any]:
        rest = iter(tensors)
        return [next(rest) if isinstance(a, torch.Tensor) else a for a in self.arguments]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = self.with_tensors(tensors)
        self.function(*given)
        return tuple(v for a, v in zip(self.op.parsed, given) if a.written and v is not None)

    def functional(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self(*(t.clone() for t in tensors))

    def replaced(self, name: str, value: Any) -> list[Any]:
        return [value if a.name == name else v for a, v in zip(self.op.parsed, copied(self.arguments))]


@pytest.fixture
def call(name: str, calls: dict[str, tuple[Any, ...]]) -> Call:
    return Call(name, calls[name])


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(bits(a), bits(b))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def in_graph(graph: torch.fx.Graph, name: str) -> bool:
    return any(node.target is getattr(torch.ops.fi_core, name).default for node in graph.nodes)


def test_the_sample_reaches_every_op(calls: dict[str, tuple[Any, ...]]) -> None:
    assert set(calls) == set(ops()) - NOT_IN_SAMPLE


@EACH_OP
def test_opcheck(name: str, calls: dict[str, tuple[Any, ...]]) -> None:
    checks = ["test_autograd_registration", "test_faketensor"]
    # The other two scale their inputs, which torch cannot do with fp8 on the CPU.
    if not any(isinstance(a, torch.Tensor) and a.dtype in FP8 for a in calls[name]):
        checks += ["test_schema", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(getattr(torch.ops.fi_core, name).default, calls[name], test_utils=checks)


@pytest.mark.parametrize("inside", [True, False], ids=["in its mode", "outside of its mode"])
def test_a_fake_tensor_among_others_is_refused(inside: bool) -> None:
    """Outside of its mode its address is its offset in bytes, so the kernel of a like call before would read there."""
    x, w, out = (torch.randn(rows, 64).half() for rows in (4, 70, 4))
    gemm(out, x, w[6:])
    mode = FakeTensorMode()
    fake = mode.from_tensor(w)[6:]
    text = "gemm: torch's dispatcher, which alone can read b, refuses the call: out is a real tensor among fake ones"
    with pytest.raises(TypeError, match=text), mode if inside else contextlib.nullcontext():
        gemm(out, x, fake)


def test_refusing_a_real_tensor_among_fake_ones_reads_none_of_its_elements() -> None:
    """Torch's own error prints all of them, which takes 8 s for 2M."""
    x, w, out = (torch.ones(rows, 1024).half() for rows in (4, 2048, 4))
    fake = FakeTensorMode().from_tensor(x)
    printed = mock.patch.object(torch.Tensor, "__repr__", side_effect=AssertionError("printed"))
    with printed, pytest.raises(TypeError, match="out is a real tensor among fake ones"):
        gemm(out, fake, w)


@EACH_OP
@pytest.mark.parametrize("inside", [True, False], ids=["in its mode", "outside of its mode"])
def test_fake_tensors_compute_nothing(call: Call, inside: bool) -> None:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in call.tensors]
    if inside:
        with mode:
            written = call(*fakes)
    else:
        written = call(*fakes)
    assert written
    assert all(type(t).__name__ == "FakeTensor" for t in written)


@EACH_OP
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_keeps_the_op(call: Call, mode: str) -> None:
    traced = make_fx(call, tracing_mode=mode)(*call.tensors)
    assert in_graph(traced.graph, call.name)
    assert_same(traced(*call.tensors), call(*call.tensors))


class Exported(torch.nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.call.functional(*tensors)


@EACH_OP
def test_an_exported_program_runs(call: Call) -> None:
    program = torch.export.export(Exported(call), tuple(call.tensors), strict=False)
    assert in_graph(program.graph, call.name)
    assert_same(program.module()(*call.tensors), call(*call.tensors))


@EACH_OP
def test_aot_export(call: Call) -> None:
    """A mutable op arrives functionalized: the graph names it as an argument of auto_functionalized."""
    module, _ = aot_export_module(Exported(call), tuple(call.tensors), trace_joint=False)
    target = getattr(torch.ops.fi_core, call.name).default
    assert any(node.target is target or target in node.args for node in module.graph.nodes)


@EACH_OP
def test_torch_compile_has_no_graph_break(call: Call) -> None:
    torch._dynamo.reset()
    function, arguments = call.function, call.arguments
    kept = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> None:
        given = list(arguments)
        for i, tensor in zip(kept, tensors):
            given[i] = tensor
        function(*given)

    got = call.tensors
    torch.compile(run, fullgraph=True, backend="aot_eager")(*got)
    want = call.tensors
    run(*want)
    assert_same(got, want)


BEFORE_TORCH = """
import sys
from fi_core.cascade import merge_state
assert "torch" not in sys.modules
import torch
states = torch.randn(2, 4, 64), torch.randn(2, 4), torch.randn(2, 4, 64), torch.randn(2, 4)
got = torch.compile(merge_state, fullgraph=True, backend="eager")(*states)
assert all(map(torch.equal, got, merge_state(*states)))
"""


def test_the_first_call_of_an_op_that_was_declared_before_torch_may_be_traced() -> None:
    done = subprocess.run([sys.executable, "-c", BEFORE_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def pair(t: torch.Tensor) -> torch.Tensor:
    """A dense tensor twice, each with its strides, by which kernels are chosen, at the alignment of an allocation."""
    pitch = -(-t.numel() // 64) * 64
    two = t.new_empty(2 * pitch).as_strided((2, *t.shape), (pitch, *t.stride()))
    two[0], two[1] = t, t
    return two


@EACH_OP
def test_vmap_is_a_call_per_element(call: Call) -> None:
    two = [pair(t) for t in call.tensors]
    for got in zip(*torch.func.vmap(call)(*two)):
        assert_same(got, call(*call.tensors))
    written = [a.name for a in call.op.parsed if a.written and a.name in call.names]
    in_dims = tuple(None if name in written else 0 for name in call.names)
    if any(d == 0 for d in in_dims):
        mixed = [t if d is None else pair(t) for t, d in zip(call.tensors, in_dims)]
        with pytest.raises(ValueError, match=f"{call.name}: {written[0]} is written, so vmap must map it too"):
            torch.func.vmap(call, in_dims=in_dims, out_dims=None)(*mixed)


@EACH_OP
def test_autograd_hears_that_there_is_no_backward(call: Call) -> None:
    floats = [n for n, t in zip(call.names, call.tensors) if t.is_floating_point() and t.dtype not in FP8]
    for name in floats[:1] + floats[-1:]:
        at = call.names.index(name)
        tensors = call.tensors
        tensors[at].requires_grad_()
        text = f"{call.name}: there is no backward, and {name} requires grad: call it under torch.no_grad"
        with pytest.raises(NotImplementedError, match=text):
            call(*tensors)
        with pytest.raises(NotImplementedError, match=text):
            torch.func.grad(lambda *given: call(*given)[0].sum(), argnums=at)(*call.tensors)
        with torch.no_grad():
            assert_same(call(*tensors), call(*call.tensors))
        with torch.inference_mode():
            assert_same(call(*call.tensors), call(*call.tensors))


def test_autograd_hears_it_while_torch_compiles() -> None:
    x = torch.ones(4, 16, requires_grad=True)
    compiled = torch.compile(lambda x: fi_core.rmsnorm(x, torch.ones(16)), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="rmsnorm: there is no backward, and input requires grad"):
        compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), fi_core.rmsnorm(x, torch.ones(16)))


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, which records the ops that it unwraps for."""

    inner: torch.Tensor
    seen: list[Any] = []  # noqa: RUF012
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))


class Marked(torch.Tensor):
    """A subclass with memory, which records its ops."""

    seen: list[Any] = []  # noqa: RUF012
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@EACH_OP
def test_subclasses_get_the_registered_op(call: Call) -> None:
    target = getattr(torch.ops.fi_core, call.name).default
    want = call(*call.tensors)
    for at in range(len(call.names)):
        tensors, Wrapped.seen = call.tensors, []
        inner = tensors[at]
        call(*(Wrapped(t) if t is inner else t for t in tensors))
        assert target in Wrapped.seen
    for known in (False, True):  # a call whose kernel is known reads a subclass with memory as its memory
        tensors, Marked.seen = call.tensors, []
        if not known:
            operators()[call.name].forget()
        got = call(*(t.as_subclass(Marked) if t is tensors[0] else t for t in tensors))
        assert Marked.seen == ([] if known else [target])
        assert_same([t.as_subclass(torch.Tensor) for t in got], want)


def _quantized(t: torch.Tensor) -> torch.Tensor:
    return torch._empty_affine_quantized(t.shape, scale=1.0, zero_point=0, dtype=torch.qint8)


UNREADABLE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "meta": (lambda t: t.to("meta"), "a meta tensor"),
    "sparse": (lambda t: torch.zeros(t.shape).to_sparse(), "layout torch.sparse_coo"),
    "quantized": (_quantized, "a quantized tensor"),
    "nested": (lambda t: torch.nested.nested_tensor([torch.zeros(3)]), "a nested tensor"),
    "list": (lambda t: t.tolist(), "a list"),
    "numpy": (lambda t: np.zeros(tuple(t.shape), np.float32), "a ndarray"),
    "none": (lambda t: None, "None"),
}


@EACH_OP
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage", "ignore:.*quantized tensor creation")
def test_what_no_kernel_reads_is_refused_by_name(call: Call, kind: str) -> None:
    make, text = UNREADABLE[kind]
    declared: dict[str, Argument] = {a.name: a for a in call.op.parsed}
    for name, tensor in zip(call.names, call.tensors):
        if kind == "none" and declared[name].kind == "Tensor?":
            continue
        if kind == "list" and tensor.ndim == 0:
            continue
        with pytest.raises(TypeError, match=f"^{call.name}: {name} must be a dense tensor with data; got {text}") as e:
            call.function(*call.replaced(name, make(tensor)))
        assert e.value.__cause__ is None
        assert e.value.__suppress_context__


def test_views_that_negate_or_conjugate_are_refused() -> None:
    real = torch.randn(4, 16)
    negative = torch.complex(real, real).conj().imag
    assert negative.is_neg()
    with pytest.raises(TypeError, match=r"rmsnorm: input must be .* got a negative view: call resolve_neg"):
        fi_core.rmsnorm(negative, torch.ones(16))
    with pytest.raises(TypeError, match=r"rmsnorm: input must be .* got a conjugate view: call resolve_conj"):
        fi_core.rmsnorm(torch.complex(real, real).conj(), torch.ones(16))
    assert torch.equal(
        fi_core.rmsnorm(negative.resolve_neg().contiguous(), torch.ones(16)), fi_core.rmsnorm(-real, torch.ones(16))
    )


@EACH_OP
def test_a_negated_view_of_a_bound_call_is_refused_where_fi_check_asks(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_CHECK", True)
    operator = operators()[call.name]
    operator.forget()
    call(*call.tensors)
    for name, tensor in zip(call.names, call.tensors):
        with pytest.raises(TypeError, match=f"^{call.name}: {name} must be a dense tensor with data; got a negative"):
            call.function(*call.replaced(name, _neg_view(tensor)))
    operator.forget()


@EACH_OP
def test_elements_that_lie_across_words_are_refused(call: Call) -> None:
    call(*call.tensors)
    for name, tensor in zip(call.names, call.tensors):
        if tensor.element_size() == 1 or not tensor.numel():
            continue
        room = bytearray(tensor.numel() * tensor.element_size() + 1)
        odd = torch.frombuffer(room, dtype=tensor.dtype, offset=1).view(tensor.shape)
        with pytest.raises(ValueError, match=f"^{call.name}: {name} must lie at a multiple of its element size"):
            call.function(*call.replaced(name, odd.copy_(tensor)))


@EACH_OP
def test_written_elements_that_share_memory_are_refused(call: Call) -> None:
    """Results would depend on the order of writes."""
    call(*call.tensors)
    declared: dict[str, Argument] = {a.name: a for a in call.op.parsed}
    for name, tensor in zip(call.names, call.tensors):
        if not declared[name].written or tensor.numel() < 2:
            continue
        steps = [0] if tensor.ndim == 1 else [1] * tensor.ndim
        shared = torch.empty(tensor.numel(), dtype=tensor.dtype).as_strided(tensor.shape, steps)
        with pytest.raises(ValueError, match=f"^{call.name}: {name} is written, so no two of its elements may share"):
            call.function(*call.replaced(name, shared))


@EACH_OP
def test_sizes_that_no_memory_has_are_errors(call: Call) -> None:
    """Elements that share memory may be as many as 64 bits count; a size, and one more, still do not wrap."""
    call(*call.tensors)
    for name, tensor in zip(call.names, call.tensors):
        for axis in range(tensor.ndim if tensor.numel() else 0):
            others = tensor.numel() // tensor.shape[axis]
            shape = [((1 << 63) - 1) // others if i == axis else n for i, n in enumerate(tensor.shape)]
            with pytest.raises((ValueError, TypeError), match=f"^{call.name}: "):
                call.function(*call.replaced(name, tensor.narrow(axis, 0, 1).expand(shape)))


def test_memory_that_is_not_there_is_refused() -> None:
    """A tensor of zeros without memory, which torch's autograd makes."""
    with pytest.raises(TypeError, match="rmsnorm: input has no data"):
        fi_core.rmsnorm(torch._efficientzerotensor((4, 16)), torch.ones(16))


def test_supports_answers_with_a_reason() -> None:
    assert supports("rmsnorm", dtype="bf16", out="bf16", residual=False) == (True, "")
    ok, why = supports("rmsnorm", capability=75, dtype="bf16", out="bf16", residual=False)
    assert not ok
    assert "requires capability >= 80, got 75" in why
    with pytest.raises(ValueError, match="fields of a request are dtype, out, residual; got type"):
        supports("rmsnorm", type="bf16")
