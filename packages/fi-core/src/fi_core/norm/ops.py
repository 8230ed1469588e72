"""Declares the operators of the norm family, and their kernel entries."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values

_MAX_D = 2**30  # of the entries that loop over a row


class NormConfig(NamedTuple):
    rows_per_cta: int
    vec_size: int  # elements per vector
    vectors_per_thread: int
    max_d: int


def _cta_entry(op: str, arguments: str, vec: int, num_vecs: int, threads: int) -> Entry:
    """An entry whose CTA holds one row in registers."""
    config = NormConfig(1, vec, num_vecs, vec * num_vecs * threads)
    return Entry(f"{op}_cta_{threads}_{num_vecs}", f"{op}_cta<{arguments}>", threads, config)


def _loop_entry(op: str, name: str, arguments: str, vec: int) -> Entry:
    """An entry whose CTA loops over one row of any length, and reads it more than once."""
    return Entry(f"{op}_{name}", f"{op}_loop<{arguments}>", 1024, NormConfig(1, vec, 1, _MAX_D))


# Kernel entries are in order of preference.
def _rmsnorm_unit(axes: Values) -> Unit:
    dtype, out = DTYPES[str(axes["dtype"])], DTYPES[str(axes["out"])]
    types, vec = f"{dtype.device}, {out.device}", 16 // dtype.bytes
    residual = str(axes["residual"]).lower()
    entries = []
    for lanes, num_vecs, rows in ((16, 1, 2), (32, 1, 2), (32, 2, 1), (32, 4, 1)):
        body = f"rmsnorm_warp<{types}, {vec}, {lanes}, {num_vecs}, {rows}, {residual}>"
        config = NormConfig(256 // lanes * rows, vec, num_vecs, vec * lanes * num_vecs)
        entries.append(Entry(f"rmsnorm_warp_{lanes}_{num_vecs}", body, 256, config))
    # Without a residual the kernel of 256 threads takes 48 registers per thread, so 5 CTAs fit on an SM (sm_90a).
    for num_vecs, threads in ((2, 256), (4, 512)) if axes["residual"] else ((2, 256), (4, 256), (4, 512)):
        entries.append(_cta_entry("rmsnorm", f"{types}, {vec}, {num_vecs}, {residual}", vec, num_vecs, threads))
    entries.append(_loop_entry("rmsnorm", "loop", f"{types}, {vec}, {residual}", vec))
    entries.append(_loop_entry("rmsnorm", "scalar", f"{types}, 1, {residual}", 1))
    return Unit("fi/norm/rmsnorm.cuh", "RmsnormParams", tuple(entries))


def _layernorm_unit(axes: Values) -> Unit:
    dtype, out = DTYPES[str(axes["dtype"])], DTYPES[str(axes["out"])]
    types, vec = f"{dtype.device}, {out.device}", 16 // dtype.bytes
    entries = []
    for num_vecs in (1, 4):
        config = NormConfig(8, vec, num_vecs, vec * 32 * num_vecs)
        body = f"layernorm_warp<{types}, {vec}, {num_vecs}>"
        entries.append(Entry(f"layernorm_warp_{num_vecs}", body, 256, config))
    for num_vecs, threads in ((2, 256), (4, 512)):
        entries.append(_cta_entry("layernorm", f"{types}, {vec}, {num_vecs}", vec, num_vecs, threads))
    entries.append(_loop_entry("layernorm", "loop", f"{types}, {vec}", vec))
    entries.append(_loop_entry("layernorm", "scalar", f"{types}, 1", 1))
    return Unit("fi/norm/layernorm.cuh", "LayernormParams", tuple(entries))


def _rmsnorm_block_quant_unit(axes: Values) -> Unit:
    dtype = DTYPES[str(axes["dtype"])]
    entries = [
        _cta_entry("rmsnorm_block_quant", f"{dtype.device}, {num_vecs}", 8, num_vecs, threads)
        for num_vecs, threads in ((2, 256), (4, 512))
    ]
    entries.append(_loop_entry("rmsnorm_block_quant", "loop", dtype.device, 8))
    return Unit("fi/norm/rmsnorm_block_quant.cuh", "RmsnormBlockQuantParams", tuple(entries))


_DTYPES = ("f16", "bf16", "f32")
_OUTS = (*_DTYPES, "e4m3", "e5m2")

RMSNORM = Op(
    name="rmsnorm",
    family="norm",
    arguments="Tensor(a!) out, Tensor(a) input, Tensor weight, float eps=1e-06, bool? enable_pdl=None, "
    "Tensor(b!)? residual=None, Tensor? scale=None, float weight_bias=0.0",
    axes={"dtype": _DTYPES, "out": _OUTS, "residual": (False, True)},
    config=NormConfig,
    varies={"residual": (False, True)},
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _rmsnorm_unit)),
    prebuilt=tuple(
        {"dtype": dtype, "out": out, "residual": residual}
        for dtype, outs in (("f16", ("f16", "e4m3", "e5m2")), ("bf16", ("bf16", "e4m3", "e5m2")), ("f32", ("f32",)))
        for out in outs
        for residual in (False, True)
    ),
)

LAYERNORM = Op(
    name="layernorm",
    family="norm",
    arguments="Tensor(a!) out, Tensor input, Tensor gemma, Tensor beta, Tensor? scale=None, float eps=1e-06",
    axes={"dtype": _DTYPES, "out": _OUTS},
    config=NormConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _layernorm_unit)),
    prebuilt=tuple(
        {"dtype": dtype, "out": out}
        for dtype, outs in (("f16", ("f16", "e4m3")), ("bf16", ("bf16", "e4m3")), ("f32", ("f32",)))
        for out in outs
    ),
)

RMSNORM_BLOCK_QUANT = Op(
    name="rmsnorm_block_quant",
    family="norm",
    arguments="Tensor(a!) out, Tensor(b!) block_scale, Tensor(c!) normed_out, Tensor(c) input, Tensor(d!) residual, "
    "Tensor weight, float eps=1e-06, bool? enable_pdl=None",
    axes={"dtype": ("f16", "bf16")},
    config=NormConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _rmsnorm_block_quant_unit)),
)

rmsnorm = operator(RMSNORM)
layernorm = operator(LAYERNORM)
rmsnorm_block_quant = operator(RMSNORM_BLOCK_QUANT)
