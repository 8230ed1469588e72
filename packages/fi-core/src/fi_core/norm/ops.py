"""The ops of the norm family: what their kernels are compiled for, and their launchers."""

from __future__ import annotations

from fi_core.launch.op import Launcher
from fi_core.spec.constraint import ON_CPU, at_least
from fi_core.spec.dtype import DTYPES
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit

_LARGEST_D = 2**30  # of the entries that loop over a row


def _block(op: str, name: str, arguments: str, vec: int, count: int, threads: int) -> Entry:
    """An entry whose blocks hold one row in registers."""
    config = (1, vec, count, vec * count * threads)
    return Entry(f"{op}_{name}_{threads}_{count}", f"{op}_{name}<{arguments}>", threads, config)


def _loop(op: str, name: str, arguments: str, vec: int) -> Entry:
    """An entry whose blocks read one row of any length more than once."""
    return Entry(f"{op}_{name}", f"{op}_loop<{arguments}>", 1024, (1, vec, 1, _LARGEST_D))


# Every config is (rows a block, elements a vector, vectors a thread, largest d), in order of preference.
def _rmsnorm_unit(axes: Axes) -> Unit:
    dtype, out = DTYPES[str(axes["dtype"])], DTYPES[str(axes["out"])]
    types, vec = f"{dtype.device}, {out.device}", 16 // dtype.bytes
    residual = str(axes["residual"]).lower()
    entries = []
    for lanes, count, rows in ((16, 1, 2), (32, 1, 2), (32, 2, 1), (32, 4, 1)):
        body = f"rmsnorm_lanes<{types}, {vec}, {lanes}, {count}, {rows}, {residual}>"
        config = (256 // lanes * rows, vec, count, vec * lanes * count)
        entries.append(Entry(f"rmsnorm_lanes_{lanes}_{count}", body, 256, config))
    # A bound of 256 threads leaves 48 registers without a residual, so a fifth block fits on an SM (sm_90a).
    for count, threads in ((2, 256), (4, 512)) if axes["residual"] else ((2, 256), (4, 256), (4, 512)):
        entries.append(_block("rmsnorm", "block", f"{types}, {vec}, {count}, {residual}", vec, count, threads))
    entries.append(_loop("rmsnorm", "loop", f"{types}, {vec}, {residual}", vec))
    entries.append(_loop("rmsnorm", "scalar", f"{types}, 1, {residual}", 1))
    return Unit("fi/norm/rmsnorm.cuh", "RmsnormParams", tuple(entries))


def _layernorm_unit(axes: Axes) -> Unit:
    dtype, out = DTYPES[str(axes["dtype"])], DTYPES[str(axes["out"])]
    types, vec = f"{dtype.device}, {out.device}", 16 // dtype.bytes
    entries = []
    for count in (1, 4):
        config = (8, vec, count, vec * 32 * count)
        entries.append(Entry(f"layernorm_warp_{count}", f"layernorm_warp<{types}, {vec}, {count}>", 256, config))
    for count, threads in ((2, 256), (4, 512)):
        entries.append(_block("layernorm", "block", f"{types}, {vec}, {count}", vec, count, threads))
    entries.append(_loop("layernorm", "loop", f"{types}, {vec}", vec))
    entries.append(_loop("layernorm", "scalar", f"{types}, 1", 1))
    return Unit("fi/norm/layernorm.cuh", "LayernormParams", tuple(entries))


def _rmsnorm_block_quant_unit(axes: Axes) -> Unit:
    dtype = DTYPES[str(axes["dtype"])]
    entries = [
        _block("rmsnorm_block_quant", "block", f"{dtype.device}, {count}", 8, count, threads)
        for count, threads in ((2, 256), (4, 512))
    ]
    entries.append(_loop("rmsnorm_block_quant", "loop", dtype.device, 8))
    return Unit("fi/norm/rmsnorm_block_quant.cuh", "RmsnormBlockQuantParams", tuple(entries))


_DTYPES = ("f16", "bf16", "f32")
_OUTS = (*_DTYPES, "e4m3", "e5m2")

RMSNORM = Op(
    name="rmsnorm",
    family="norm",
    schema="(Tensor(a!) out, Tensor input, Tensor(b!)? residual, Tensor weight, Tensor? scale, float eps, "
    "float weight_bias, bool? enable_pdl) -> ()",
    axes={"dtype": _DTYPES, "out": _OUTS, "residual": (False, True)},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _rmsnorm_unit)),
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
    schema="(Tensor(a!) out, Tensor input, Tensor gemma, Tensor beta, Tensor? scale, float eps) -> ()",
    axes={"dtype": _DTYPES, "out": _OUTS},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _layernorm_unit)),
    prebuilt=tuple(
        {"dtype": dtype, "out": out}
        for dtype, outs in (("f16", ("f16", "e4m3")), ("bf16", ("bf16", "e4m3")), ("f32", ("f32",)))
        for out in outs
    ),
)

RMSNORM_BLOCK_QUANT = Op(
    name="rmsnorm_block_quant",
    family="norm",
    schema="(Tensor(a!) out, Tensor(b!) block_scale, Tensor(c!) normed_out, Tensor input, Tensor(d!) residual, "
    "Tensor weight, float eps, bool? enable_pdl) -> ()",
    axes={"dtype": ("f16", "bf16")},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _rmsnorm_block_quant_unit)),
)

rmsnorm = Launcher(
    RMSNORM, lambda out, input, residual, *_: (input.get_device(), input.dtype, out.dtype, residual is not None)
)
layernorm = Launcher(LAYERNORM, lambda out, input, *_: (input.get_device(), input.dtype, out.dtype))
rmsnorm_block_quant = Launcher(
    RMSNORM_BLOCK_QUANT, lambda out, block_scale, normed_out, input, *_: (input.get_device(), input.dtype)
)
