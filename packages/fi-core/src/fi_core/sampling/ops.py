"""Declares the ops of the sampling family: their schemas, implementations, compiled kernels and launchers."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import THREADS, Entry, Implementation, Op, Unit, Values

RENORMALISE, MASK_OUT = 1, 2  # the output of `sample` for a filtered row; 0: a token
_NAMES = {True: "sample", False: "rewrite"}  # of kernel entries that draw tokens, and that write rows


class SampleConfig(NamedTuple):
    ctas_per_sm: int
    row_bytes: int = 0  # of a row that a CTA should cache in shared memory; 0: none
    tiles_per_warp: int = 0  # of softmax: cached in shared memory


def _cluster_unit(axes: Values) -> Unit:
    """Kernel entries for cached rows and, of draws, for rows read in a single pass; of rewritten rows, for softmax."""
    dtype, draws = DTYPES[str(axes["dtype"])].device, bool(axes["draws"])
    cluster = Entry(
        f"{_NAMES[draws]}_cluster_512",
        f"sample_cluster<{dtype}, 512, {str(draws).lower()}>",
        512,
        SampleConfig(1, row_bytes=200 * 1024),
        ctas_per_sm=1,
    )
    single_pass = Entry(
        "sample_single_pass_512", f"sample_single_pass<{dtype}, 512>", 512, SampleConfig(2), ctas_per_sm=2
    )
    softmax = (
        Entry(
            f"softmax_cluster_{threads}",
            f"softmax_cluster<{dtype}, {threads}, 3>",
            threads,
            SampleConfig(ctas, tiles_per_warp=3),
            ctas_per_sm=ctas,
        )
        for threads, ctas in ((256, 4), (1024, 1))
    )
    # Draws have a unit of their own, because an engine's step rewrites no rows: 2.0 s of one core, not 2.5
    # (NVRTC 13.0, fp32). The compiler runs on several threads.
    entries = (cluster, single_pass) if draws else (cluster, *softmax)
    return Unit("fi/sampling/sample_sm90.cuh", "SampleParams", entries, flags=THREADS)


def _cta_unit(axes: Values) -> Unit:
    """One kernel entry, which reads rows from global memory."""
    dtype, draws = DTYPES[str(axes["dtype"])].device, bool(axes["draws"])
    body = f"sample_cta<{dtype}, 512, {str(draws).lower()}>"
    entry = Entry(f"{_NAMES[draws]}_cta_512", body, 512, SampleConfig(1), ctas_per_sm=1)
    return Unit("fi/sampling/sample.cuh", "SampleParams", (entry,))


def _chain_unit(axes: Values) -> Unit:
    """One kernel entry, without config."""
    entry = Entry("chain_speculative_512", "chain_speculative<512>", 512, ctas_per_sm=1)
    return Unit("fi/sampling/chain_speculative.cuh", "ChainParams", (entry,))


SAMPLE = Op(
    name="sample",
    family="sampling",
    arguments="Tensor(a!) out, Tensor input, bool logits=False, bool joint=False, Tensor(b!)? valid=None, "
    "Tensor? indices=None, int seed_value=0, int offset_value=0, float temperature_value=1.0, int top_k_value=0, "
    "float top_p_value=1.0, float min_p_value=0.0, Tensor? seed=None, Tensor? offset=None, "
    "Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
    "Tensor(c!)? adjusted=None, Tensor? bias=None, Tensor? bitmask=None, Tensor? seen=None, Tensor? seen_count=None, "
    "Tensor? repetition_penalty=None, float repetition_penalty_value=1.0, "
    "Tensor? frequency_penalty=None, float frequency_penalty_value=0.0, "
    "Tensor? presence_penalty=None, float presence_penalty_value=0.0, int output=0",
    axes={"dtype": ("f16", "bf16", "f32"), "draws": (True, False)},
    config=SampleConfig,
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation("cluster", exactly(90), _cluster_unit),
        Implementation("cuda", at_least(80), _cta_unit),
    ),
)

CHAIN_SPECULATIVE = Op(
    name="chain_speculative",
    family="sampling",
    arguments="Tensor(a!) tokens, Tensor(b!) maybe_output_accepted_token_num, "
    "Tensor(c!) maybe_output_emitted_draft_token_num, Tensor draft_probs, Tensor draft_token_ids, "
    "Tensor target_probs, Tensor? seed=None, int seed_value=0, Tensor? offset=None, int offset_value=0",
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _chain_unit)),
)

sample = operator(SAMPLE)
chain_speculative = operator(CHAIN_SPECULATIVE)
