"""The ops of the sampling family: what their kernels are compiled for, and their launchers."""

from __future__ import annotations

from fi_core.launch.op import Launcher
from fi_core.spec.constraint import ON_CPU, at_least, exactly
from fi_core.spec.dtype import DTYPES
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit

DRAW_TOKEN, RENORMALISE, MASK_OUT = range(3)  # what sample makes of a filtered row


def _cluster_unit(axes: Axes) -> Unit:
    """Entries for rows that are held, for rows that are streamed, and for softmax. config: (blocks on an SM, bytes of a
    row that a block should hold), (blocks on an SM), (blocks on an SM, pieces that a warp holds in shared memory)."""
    dtype = DTYPES[str(axes["dtype"])].device
    entries = (
        Entry("sample_cluster_512", f"sample_cluster<{dtype}, 512>", 512, (1, 200 * 1024), blocks_per_sm=1),
        Entry("sample_stream_512", f"sample_stream<{dtype}, 512>", 512, (2,), blocks_per_sm=2),
        Entry("softmax_cluster_256", f"softmax_cluster<{dtype}, 256, 3>", 256, (4, 3), blocks_per_sm=4),
        Entry("softmax_cluster_1024", f"softmax_cluster<{dtype}, 1024, 3>", 1024, (1, 3), blocks_per_sm=1),
    )
    # In threads of the compiler: 1.7 s for 2.4 (two cores, NVRTC 13.0).
    return Unit("fi/sampling/sample_sm90.cuh", "SampleParams", entries, flags=("--split-compile=4",))


def _block_unit(axes: Axes) -> Unit:
    """One entry, with no config."""
    body = f"sample_block<{DTYPES[str(axes['dtype'])].device}, 512>"
    entry = Entry("sample_block_512", body, 512, blocks_per_sm=1)
    return Unit("fi/sampling/sample.cuh", "SampleParams", (entry,))


def _chain_unit(axes: Axes) -> Unit:
    """One entry, with no config."""
    entry = Entry("chain_speculative_512", "chain_speculative<512>", 512, blocks_per_sm=1)
    return Unit("fi/sampling/chain_speculative.cuh", "ChainParams", (entry,))


SAMPLE = Op(
    name="sample",
    family="sampling",
    schema="(Tensor(a!) out, Tensor(b!)? valid, Tensor(c!)? adjusted, Tensor input, Tensor? indices, "
    "Tensor? temperature, float temperature_value, Tensor? top_k, int top_k_value, Tensor? top_p, float top_p_value, "
    "Tensor? min_p, float min_p_value, Tensor? seed, int seed_value, Tensor? offset, int offset_value, Tensor? bias, "
    "Tensor? bitmask, Tensor? seen, Tensor? seen_count, Tensor? repetition, float repetition_value, "
    "Tensor? frequency, float frequency_value, Tensor? presence, float presence_value, int output, bool logits, "
    "bool joint) -> ()",
    axes={"dtype": ("f16", "bf16", "f32")},
    impls=(
        Impl("cpu", ON_CPU),
        Impl("cluster", exactly(90), _cluster_unit),
        Impl("cuda", at_least(80), _block_unit),
    ),
)

CHAIN_SPECULATIVE = Op(
    name="chain_speculative",
    family="sampling",
    schema="(Tensor(a!) tokens, Tensor(b!) accepted, Tensor(c!) emitted, Tensor draft_probs, Tensor draft_token_ids, "
    "Tensor target_probs, Tensor? seed, int seed_value, Tensor? offset, int offset_value) -> ()",
    axes={},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _chain_unit)),
)

sample = Launcher(SAMPLE, lambda out, valid, adjusted, input, *_: (input.get_device(), input.dtype))
chain_speculative = Launcher(CHAIN_SPECULATIVE, lambda tokens, *_: (tokens.get_device(),))
