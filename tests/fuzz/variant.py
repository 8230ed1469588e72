"""The modules that the fuzz calls: those of all ops on the CPU, and attention variants, of a user and of fi."""

from __future__ import annotations

import torch

from families import test_variants as variants
from fi_core import aot
from fi_core.attention.wrappers.bidirectional_ranges import variant
from fi_core.jit.attention import (
    gen_customize_batch_prefill_module,
    gen_customize_single_decode_module,
    gen_customize_single_prefill_module,
)
from fi_core.jit.base import JitSpec
from fi_core.runtime.launch.kernel import load_module
from fi_core.runtime.resolve import find


def specs() -> list[JitSpec]:
    """The variant of the fuzz, for decode and for prefill, and that of the wrapper whose rows have ranges of keys."""
    uri, q, kv, o, _, *rest = variants.jit_args(variants.ALIBI)
    return [
        gen_customize_single_decode_module(uri, q, kv, o, *rest),
        gen_customize_single_prefill_module("fa2", uri, q, kv, o, *rest),
        gen_customize_batch_prefill_module("fa2", *variant((torch.float16,) * 3, (64, 64))),
    ]


def preload() -> None:
    """Loads every module once, so that forked workers share them."""
    for artifact in (*aot.artifacts(["cpu"]), *(spec.host for spec in specs())):
        load_module(next(find(artifact)))
