"""The judge of batch invariance: draws batches by a seed, and compares the bits of each row with those it has alone.

A described function whose inputs and outputs share an axis of rows is judged by its description; others are judged by
`Requests`, which know how a batch of theirs is put together.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import torch

from fi_core.observe.trace import Described, Tensor, Var

ROW_AXES = ("batch_size", "batch", "rows", "m", "num_tokens", "n", "nnz", "num_rows")
_BLOCKS = "scales lie in tiles of 128 rows: the product is that of mm_bf16, the scales those of *_quantize"
_MASKED = "rows from the mask on are not written"
# Functions that no axis of rows describes whole, and why.
OTHERS = {
    **{
        (name, "rows"): _BLOCKS
        for name in (
            "e2m1_and_ufp8sf_scale_to_float", "mxfp4_dequantize", "mxfp4_dequantize_host", "mxfp8_dequantize_host",
        )
    },
    **{(name, "m"): _BLOCKS for name in ("mm_fp4", "mm_mxfp8", "bmm_mxfp8", "gemm_fp8_nt_groupwise")},
    ("bmm_mxfp8", "batch_size"): _BLOCKS,
    ("scaled_fp4_grouped_quantize", "rows"): _MASKED,
    ("mxfp8_grouped_quantize", "rows"): _MASKED,
    ("batch_deepgemm_fp8_nt_groupwise", "m"): _MASKED,
    ("fused_add_rmsnorm_fp8_block_quant", "batch_size"): "scales are padded to 4 rows",
    ("checkpointing_ssu", "batch_size"): "its rows are judged by selective_state_update, of the same bits",
    ("fused_qk_rmsnorm_rope", "num_tokens"): "the position of a token in its frame is its row",
    ("top_k_page_table_transform", "num_rows"): "judged by top_k",
    ("fp8_paged_mqa_logits", "rows"): "judged by requests",
    ("fp8_paged_indexer_topk", "rows"): "the logits of fp8_paged_mqa_logits, then top_k",
    ("bgmv_moe", "num_tokens"): "its pairs name tokens by number; the kernel is that of add_lora_linear",
}  # fmt: skip
UNCAPTURED: frozenset[str] = frozenset()  # functions that copy to the host
_TABLES = ("plus_1", "len_", "bounds", "offsets")  # in names of dimensions of tables
BATCHES = ((2, 3), (7, 17), (33, 66, 130))  # one of each
TOKENS = ((2, 3, 7), (17, 33, 66, 130), (200, 300))  # likewise of products, whose kernels are chosen by such numbers
ALONE = 6  # rows whose bits are compared
PRODUCTS = 24  # likewise of products, whose sums in two orders seldom round to two values
# Sizes that samples have where they name them: enough sums of a row to see one differ.
SIZES = {"m": 40, "n": 512, "k": 640, "num_tokens": 40, "hidden_size": 256, "intermediate_size": 256}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaN equals itself, and 0 differs from -0."""
    return x.contiguous().view(-1).view(torch.uint8)


def captured(call: Callable[[], Any]) -> Any:
    """What a call returns from a CUDA graph."""
    call()  # loads kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    graph.replay()
    return found


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(bits(x), bits(y)) for x, y in zip(a, b))


def moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(x, device) for x in value)
    return value


class Rows(NamedTuple):
    """A described function, and an axis of rows: of its inputs and outputs by parameter, each with the number of the
    dimension and its place in a tuple.
    """

    described: Described
    axis: str

    def dims(self) -> dict[str, list[tuple[int | None, int]]]:
        template, found = self.described.template, dict[str, list[tuple[int | None, int]]]()
        for entries in (template.inputs, {k: e for k, e in template.outputs.items() if e.param}):
            for key, entry in entries.items():
                if isinstance(entry, Tensor):
                    at = [i for i, name in enumerate(entry.dim_names) if name == self.axis]
                    if at:
                        found.setdefault(entry.param or key, []).append((entry.tuple_idx, at[0]))
        return found

    def chosen(self, arguments: Mapping[str, Any], index: torch.Tensor) -> dict[str, Any]:
        """The arguments of a call of these rows; tensors that the call writes are its own."""
        given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        for name, places in self.dims().items():
            value = arguments.get(name)
            for part, dim in places:
                if part is not None and isinstance(value, (tuple, list)):
                    given[name] = [*given[name]]
                    given[name][part] = value[part].index_select(dim, index)
                    given[name] = type(value)(given[name])
                elif isinstance(value, torch.Tensor):
                    given[name] = value.index_select(dim, index)
        for name in ("seed", "offset", "indices"):  # of each row
            if isinstance(arguments.get(name), torch.Tensor) and name not in self.dims():
                given[name] = arguments[name].index_select(0, index)
        return given

    def outputs(self, arguments: Mapping[str, Any], index: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """Each output with its dimension of rows."""
        template, given = self.described.template, self.chosen(arguments, index)
        got = template.results(given, self.described.call(given))
        found = []
        for key, entry in template.outputs.items():
            at = [i for i, name in enumerate(entry.dim_names) if name == self.axis] if isinstance(entry, Tensor) else []
            if at:
                found.append((got[key], at[0]))
        return found

    def _clear(self, arguments: Mapping[str, Any], row: int) -> None:
        """Makes the floats of a row zeros, as those of padding in a CUDA graph."""
        for name, places in self.dims().items():
            for part, dim in places:
                value = arguments.get(name)
                x = value if part is None or value is None else value[part]
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    x.select(dim, row).zero_()

    def differences(self, seed: int, device: str, batches: int = 3) -> list[str]:
        """What differs: rows in drawn batches, in one of them from a CUDA graph, from the same rows alone.

        batches: so many, the smallest first.
        """
        rng, template, multiplies = Random(seed), self.described.template, self.axis in ("m", "num_tokens")
        known = inspect.signature(template.make).parameters if multiplies and template.make else ()
        sizes = {name: size for name, size in SIZES.items() if name in known}
        arguments = {k: moved(v, device) for k, v in template.sample(generator=seed, **sizes).items()}
        if len(getattr(template.inputs.get("indices"), "dim_names", ())) == 1:  # of rows of logits
            first = next(iter(template.inputs))
            arguments["indices"] = torch.arange(len(arguments[first]), dtype=torch.int32, device=device)
        name, ((part, dim), *_) = next((n, at) for n, at in self.dims().items() if arguments.get(n) is not None)
        first = arguments[name] if part is None else arguments[name][part]
        count = first.shape[dim]
        if "seed" in inspect.signature(self.described.function).parameters:
            arguments |= {k: torch.arange(count, device=device) * 3 + 5 for k in ("seed", "offset")}
        rows = rng.sample(range(count), min(PRODUCTS if multiplies else ALONE, count))
        padding = next((row for row in range(count) if row not in rows), None)
        if padding is not None:
            self._clear(arguments, padding)
        alone = {row: self.outputs(arguments, torch.tensor([row], device=device)) for row in rows}
        wrong = []
        for size in map(rng.choice, (TOKENS if multiplies else BATCHES)[:batches]):
            if "num_slots" in template.axes:  # two rows do not write the same slot
                batch = rng.sample(range(count), min(size, count))
            else:
                batch = [rng.choice(rows) if rng.random() < 0.5 else rng.randrange(count) for _ in range(size)]
                batch += [] if padding is None else [padding] * 3
            index = torch.tensor(batch, device=device)
            call = functools.partial(self.outputs, arguments, index)
            replays = device == "cuda" and size > 30 and self.described.name not in UNCAPTURED
            got = captured(call) if replays else call()
            wrong += [
                f"row {row} at {i} of {size}"
                for i, row in enumerate(batch)
                if row in alone and not same([x.select(d, i) for x, d in got], [x.select(d, 0) for x, d in alone[row]])
            ]
        return wrong


def row_cases(described: Sequence[Described]) -> list[Rows]:
    """The functions that are judged by rows, once for each axis."""
    found = []
    for one in described:
        template = one.template
        dims = {n for e in template.inputs.values() if isinstance(e, Tensor) for n in e.dim_names}
        first = next(iter(template.outputs.values()))
        if not isinstance(first, Tensor) or any(word in name for name in dims for word in _TABLES):
            continue
        for axis in first.dim_names:
            known = axis in ROW_AXES and isinstance(template.axes[axis], Var) and (one.name, axis) not in OTHERS
            if known and axis in dims:
                found.append(Rows(one, axis))
    return found


class Requests(NamedTuple):
    """A function of requests of several tokens.

    draw: (rng, device) -> the inputs of one request. call: (requests, rng, device) -> the outputs of each, in a batch
    whose pages and the like are drawn; the first has its tokens along dimension 0. cut: the chunks of a prompt as
    requests of their own. names: of the inputs that have tokens, where a state carries a request from chunk to chunk,
    cut at multiples of `step` tokens.
    """

    name: str
    draw: Callable[[Random, str], Any]
    call: Callable[..., list[list[torch.Tensor]]]
    cut: Callable[[Any, Random], list[Any]] | None = None
    names: tuple[str, ...] = ()
    step: int = 64

    def differences(self, seed: int, device: str, batches: int = 3) -> list[str]:
        """What differs: requests in drawn batches and in drawn chunks from the same requests alone.

        batches: so many, the smallest first.
        """
        rng = Random(seed)
        requests = [self.draw(rng, device) for _ in range(ALONE)]
        alone = [self.call([request], rng, device)[0] for request in requests]
        wrong = []
        for size in (2, 5, rng.choice((9, 17)))[:batches]:
            batch = [rng.randrange(len(requests)) for _ in range(size)]
            got = self.call([requests[b] for b in batch], rng, device)
            wrong += [f"request {b} at {i} of {size}" for i, b in enumerate(batch) if not same(got[i], alone[b])]
        for b, request in enumerate(requests):
            chunked = self._chunked(request, rng, device)
            if chunked and not same(chunked, alone[b][: len(chunked)]):
                wrong.append(f"request {b} in chunks")
        return wrong

    def _chunked(self, request: Any, rng: Random, device: str) -> list[torch.Tensor]:
        """The outputs of a request that is computed in chunks; none if it cannot be."""
        if self.cut is not None:
            found = [self.call([chunk], rng, device)[0] for chunk in self.cut(request, rng)]
            return [torch.cat(parts) for parts in zip(*found)]
        if not self.names:
            return []
        count, state = len(request[self.names[0]]), request["state"]
        at = sorted({0, count, rng.randint(0, count) // self.step * self.step})
        outputs = []
        for a, b in itertools.pairwise(at):
            chunk = {name: request[name][a:b] for name in self.names}
            out, state = self.call([{**chunk, "state": state}], rng, device)[0]
            outputs.append(out)
        return [torch.cat(outputs), state]
