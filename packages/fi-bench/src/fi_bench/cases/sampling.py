"""Cases of sampling: rewritten rows are compared; drawn tokens must pass the filters."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fi_bench.case import Case, Inputs, Outputs, Tolerance, Work
from fi_bench.cases.common import normal
from fi_bench.described import described, sizes_of

if TYPE_CHECKING:
    import torch

Filters = tuple[str, ...]  # which of top_k, top_p, min_p a routine applies


def _sizes(p: Namespace) -> dict[str, Any]:
    same = ("vocab_size", "top_k", "top_p", "min_p", "temperature", "logits_std")
    return sizes_of(p, *same, rows="batch_size", dtype="input_dtype")


def _rows(x: Inputs) -> torch.Tensor:
    rows: torch.Tensor = x.logits if "logits" in x else x.probs
    return rows


def _chain(p: Namespace, device: Any, generator: Any) -> Inputs:
    import torch

    batch, n, vocab = p.batch_size, p.num_speculate_tokens, p.vocab_size
    target = normal((batch, n + 1, vocab), torch.float32, device, generator).softmax(-1)
    draft = (target[:, :n].log() + normal((batch, n, vocab), torch.float32, device, generator, 0.5)).softmax(-1)
    ids = torch.multinomial(draft.reshape(-1, vocab), 1, generator=generator).view(batch, n).int()
    return Inputs(draft_probs=draft.contiguous(), ids=ids, target_probs=target)


def _kept(x: Inputs, filters: Filters, wide: bool = True) -> torch.Tensor:
    """Which elements pass the filters, in fp64 or in the rows' own precision."""
    rows = _rows(x).double() if wide else _rows(x).float()
    p: torch.Tensor = rows.softmax(-1) if "logits" in x else rows
    ordered = p.sort(-1, descending=True).values
    kept = p > 0
    if "top_k" in filters:
        kept &= p >= ordered[:, x.top_k - 1 : x.top_k]
    if "top_p" in filters:
        base = p if x.get("order") == "joint" else p.where(kept, 0.0)
        ordered = base.sort(-1, descending=True).values
        cumulative = ordered.cumsum(-1)
        margin = 1e-5 if wide else 0.0  # sums near the threshold may fall on either side
        last = (cumulative < (x.top_p + margin) * cumulative[:, -1:]).sum(-1, keepdim=True).clamp(max=p.shape[1] - 1)
        kept &= p >= ordered.gather(1, last)
    if "min_p" in filters:
        kept &= p >= x.min_p * p.amax(-1, keepdim=True)
    return kept


def _drawn(*filters: str) -> Callable[[Inputs, Any], Outputs]:
    def outputs(x: Inputs, tokens: Any) -> Outputs:
        return {"allowed": _kept(x, filters).gather(1, tokens.long().view(-1, 1)).double()}

    return outputs


def _all_allowed(x: Inputs) -> Outputs:
    return {"allowed": _rows(x).new_ones((_rows(x).shape[0], 1)).double()}


def _multinomial(*filters: str) -> Callable[[Inputs], Any]:
    def draw(x: Inputs) -> Any:
        import torch

        p = _rows(x).float().softmax(-1) if "logits" in x else _rows(x).float()
        return torch.multinomial(p.where(_kept(x, filters, wide=False), 0.0) if filters else p, 1)

    return draw


def _softmax(x: Inputs) -> torch.Tensor:
    result: torch.Tensor = (x.logits.float() / x.temperature).softmax(-1)
    return result


def _renormalised(*filters: str) -> Callable[[Inputs], torch.Tensor]:
    def rows(x: Inputs) -> torch.Tensor:
        p = x.probs.float().where(_kept(x, filters, wide=False), 0.0)
        result: torch.Tensor = p / p.sum(-1, keepdim=True)
        return result

    return rows


def _masked(x: Inputs) -> torch.Tensor:
    kth = x.logits.topk(x.top_k, -1).values[:, -1:]
    result: torch.Tensor = x.logits.where(x.logits >= kth, float("-inf"))
    return result


def _sums(x: Inputs, outputs: Outputs) -> Outputs:
    """The kept share and the sums of the rows: an element at the top-p threshold may differ."""
    rows = outputs["renorm_probs"].double()
    kept = x.probs.double().where(rows > 0, 0.0).sum(-1)
    return {"share": kept / x.probs.double().sum(-1), "sum": rows.sum(-1)}


def _chain_outputs(x: Inputs, returned: Any) -> Outputs:
    """One row a request: draft tokens as far as emitted, then one token with more target than draft, then -1."""
    import torch

    tokens, _, emitted = returned
    n = x.ids.shape[1]
    place = torch.arange(n + 1, device=tokens.device)
    last = emitted.view(-1, 1).long()
    drafts = torch.nn.functional.pad(x.ids, (0, 1), value=-1)
    right = ((tokens == drafts) | (place >= last)).all(1) & ((tokens == -1) | (place <= last)).all(1)
    token = tokens.gather(1, last).long()
    target = x.target_probs[torch.arange(len(tokens)), last[:, 0]].gather(1, token.clamp(min=0))
    draft = torch.nn.functional.pad(x.draft_probs, (0, 0, 0, 1))[torch.arange(len(tokens)), last[:, 0]].gather(
        1, token.clamp(min=0)
    )
    return {"consistent": (right & (token >= 0)[:, 0] & (target > draft)[:, 0]).double()}


def _chain_torch(x: Inputs) -> Any:
    """Acceptance and residual draw in plain torch."""
    import torch

    batch, n = x.ids.shape
    index = x.ids.long().unsqueeze(-1)
    target, draft = x.target_probs[:, :n].gather(2, index)[..., 0], x.draft_probs.gather(2, index)[..., 0]
    yes = torch.rand_like(draft) * draft < target
    emitted = yes.int().cumprod(1).sum(1)
    residual = (x.target_probs - torch.nn.functional.pad(x.draft_probs, (0, 0, 0, 1))).clamp(min=0)
    drawn = torch.multinomial(residual[torch.arange(batch), emitted], 1).int()
    place = torch.arange(n + 1, device=x.ids.device)
    tokens = torch.nn.functional.pad(x.ids, (0, 1), value=-1).where(place < emitted.view(-1, 1), -1)
    return tokens.scatter(1, emitted.view(-1, 1).long(), drawn), yes.sum(1).int(), emitted.int()


_SUMS = {"share": Tolerance(2e-4, 2e-4), "sum": Tolerance(1e-4, 1e-4)}


def _draw(routine: str, call: Callable[[Any, Inputs], Any], *filters: str) -> Case:
    return described(
        f"sampling.{routine}",
        _sizes,
        call,
        _multinomial(*filters),
        add=lambda p, x: {"order": p.filter_apply_order},
        op="sample",
        outputs=_drawn(*filters),
        torch_outputs=_drawn(*filters),
        reference=_all_allowed,
    )


CASES = (
    described("sampling.softmax", _sizes, lambda f, x: f(x.logits, x.temperature), _softmax, op="sample"),
    _draw("sampling_from_probs", lambda f, x: f(x.probs)),
    _draw("sampling_from_logits", lambda f, x: f(x.logits)),
    _draw("top_k_sampling_from_probs", lambda f, x: f(x.probs, x.top_k), "top_k"),
    _draw("top_p_sampling_from_probs", lambda f, x: f(x.probs, x.top_p), "top_p"),
    _draw(
        "top_k_top_p_sampling_from_probs",
        lambda f, x: f(x.probs, x.top_k, x.top_p, filter_apply_order=x.order),
        *("top_k", "top_p"),
    ),
    _draw(
        "top_k_top_p_sampling_from_logits",
        lambda f, x: f(x.logits, x.top_k, x.top_p, filter_apply_order=x.order),
        *("top_k", "top_p"),
    ),
    _draw("min_p_sampling_from_probs", lambda f, x: f(x.probs, x.min_p), "min_p"),
    described(
        "sampling.top_k_renorm_probs",
        _sizes,
        lambda f, x: f(x.probs, x.top_k),
        lambda x: _renormalised("top_k")(x).to(x.probs.dtype),
        op="sample",
    ),
    described(
        "sampling.top_p_renorm_probs",
        _sizes,
        lambda f, x: f(x.probs, x.top_p),
        _renormalised("top_p"),
        compared=_sums,
        op="sample",
        tolerance=_SUMS,
    ),
    described("sampling.top_k_mask_logits", _sizes, lambda f, x: f(x.logits, x.top_k), _masked, op="sample"),
    Case(
        "chain_speculative_sampling",
        "sampling.chain_speculative_sampling",
        _chain,
        lambda f, x: f(x.draft_probs, x.ids, x.target_probs),
        _chain_outputs,
        lambda x: {"consistent": x.draft_probs.new_ones(x.draft_probs.shape[0]).double()},
        lambda p, x: Work(2 * p.batch_size * p.vocab_size, 2 * 4 * p.batch_size * p.vocab_size),
        _chain_torch,
        op="chain_speculative",
    ),
)
