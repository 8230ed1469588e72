"""A serving engine in one file: continuous batching of a Llama model over one paged KV cache, on fi_core.

Three parts: `Llama` computes the forward pass over the rows of a step, `Scheduler` selects the rows and assigns the
pages, `Engine` turns the scheduler's chunks into tensors and runs the steps. `examples/generate.py` compares it with
transformers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding, linear

import fi_core
from fi_core import comm

Attention = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # queries and the cache of a layer -> outputs


class Layer(NamedTuple):
    """Weights of a decoder layer. Projections of one input are one matrix; next_norm follows the layer."""

    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    next_norm: torch.Tensor


class Batch(NamedTuple):
    """The rows of a step, one for each token, grouped by request. All tensors are int32 on the device."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows], position in its request
    owners: torch.Tensor  # [rows], index of its request; -1: the row is padding
    last_rows: torch.Tensor  # [requests], the last row of each request
    outputs: torch.Tensor  # the rows whose logits are needed: those before a token that is not known
    indices: torch.Tensor  # page ids of all requests
    indptr: torch.Tensor  # [requests + 1], first page of each request in indices
    last_page_len: torch.Tensor  # [requests], tokens in its last page


class Llama:
    """transformers' LlamaForCausalLM: torch multiplies matrices, fi runs every other operator of the forward pass. An
    engine that is batch invariant has fi multiply them, too.

    With a workspace each of its ranks has a part of the heads and of the MLP (tensor parallelism). Every rank serves
    the same requests, and has the same logits, bit by bit.
    """

    def __init__(self, model: Any, max_positions: int, workspace: comm.AllReduceFusionWorkspace | None = None) -> None:
        c, body = model.config, model.model
        if c.attention_bias or c.mlp_bias or c.hidden_act != "silu":
            raise ValueError(
                f"model: projections without bias and silu are required; got attention_bias={c.attention_bias}, "
                f"mlp_bias={c.mlp_bias}, hidden_act={c.hidden_act!r}"
            )
        ranks, rank = (workspace.world_size, workspace.rank) if workspace else (1, 0)
        if c.num_key_value_heads % ranks or c.intermediate_size % ranks:
            raise ValueError(
                f"workspace: a number of ranks that divides key heads and MLP is required; got {ranks} ranks, "
                f"{c.num_key_value_heads} key heads and {c.intermediate_size} columns"
            )
        self.workspace, self.head_dim = workspace, c.head_dim
        self.heads, self.kv_heads = c.num_attention_heads // ranks, c.num_key_value_heads // ranks
        self.eps, self.dtype, self.device = c.rms_norm_eps, model.dtype, model.device
        self.embedding, self.lm_head = body.embed_tokens.weight.detach(), model.lm_head.weight.detach()
        self.first_norm = body.layers[0].input_layernorm.weight.detach()

        def outputs(*projections: Any) -> torch.Tensor:
            return torch.cat([p.weight.detach().chunk(ranks)[rank] for p in projections])

        def inputs(projection: Any) -> torch.Tensor:
            return projection.weight.detach().chunk(ranks, 1)[rank].contiguous()

        norms = [layer.input_layernorm for layer in body.layers[1:]] + [body.norm]
        self.layers = [
            Layer(
                outputs(a.q_proj, a.k_proj, a.v_proj),
                inputs(a.o_proj),
                layer.post_attention_layernorm.weight.detach(),
                outputs(m.gate_proj, m.up_proj),
                inputs(m.down_proj),
                norm.weight.detach(),
            )
            for layer, norm in zip(body.layers, norms)
            for a, m in [(layer.self_attn, layer.mlp)]
        ]
        # The model computes its own angles (plain, Llama 3.1, YaRN, ...): cosines and sines of all positions, in fp32.
        every = torch.arange(max_positions, device=self.device)[None]
        tables = body.rotary_emb(torch.empty(0, device=self.device), every)
        self.cos_sin = torch.cat([table[0, :, : table.shape[2] // 2] for table in tables], 1)
        self.multiply = linear

    def __call__(self, batch: Batch, caches: list[torch.Tensor], attend: Attention) -> torch.Tensor:
        """Logits `[outputs, vocab]` after the rows `batch.outputs`; appends all rows to the caches."""
        residual = embedding(batch.tokens, self.embedding)
        x = fi_core.rmsnorm(residual, self.first_norm, self.eps)
        for layer, cache in zip(self.layers, caches):
            qkv = self.multiply(x, layer.qkv).unflatten(1, (-1, self.head_dim))
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
            fi_core.apply_rope_with_cos_sin_cache_inplace(batch.positions, q, k, self.head_dim, self.cos_sin)
            fi_core.append_paged_kv_cache(
                k, v, batch.owners, batch.positions, cache, batch.indices, batch.indptr, batch.last_page_len
            )
            x = self.multiply(attend(q, cache).flatten(1), layer.o)
            self.add_norm(x, residual, layer.mlp_norm)
            x = self.multiply(fi_core.silu_and_mul(self.multiply(x, layer.gate_up)), layer.down)
            self.add_norm(x, residual, layer.next_norm)
        return self.multiply(x[batch.outputs], self.lm_head)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        """Adds x, of all ranks, to the residual; x becomes the norm of the sum."""
        if self.workspace is None:
            fi_core.fused_add_rmsnorm(x, residual, weight, self.eps)
            return
        comm.allreduce_fusion(
            x,
            self.workspace,
            comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual,
            residual_out=residual,
            norm_out=x,
            rms_gamma=weight,
            rms_eps=self.eps,
        )


@dataclass(eq=False)
class Request:
    """A prompt, its sampling parameters and its progress. `temperature` 0 takes the most likely token."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    arrival: int = 0  # the step at which it arrives
    tokens: list[int] = field(default_factory=list)  # the prompt, then the generated tokens
    cached: int = 0  # number of tokens whose keys and values are in the cache
    pages: list[int] = field(default_factory=list)  # the pages of those tokens
    drafts: list[int] = field(default_factory=list)  # guesses of the next tokens; the next step verifies them
    logits: list[torch.Tensor] | None = None  # if a list: receives the logits of every generated token

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def missing(self) -> int:
        """Tokens, with the drafts, that are not in the cache."""
        return len(self.tokens) + len(self.drafts) - self.cached


class Pool:
    """Ids, of pages for example, with a count of the users of each."""

    def __init__(self, count: int) -> None:
        self.free, self.users = list(range(count)), [0] * count

    def take(self, count: int) -> list[int]:
        """Free ids, each with one user."""
        ids = [self.free.pop() for _ in range(count)]
        self.hold(ids)
        return ids

    def hold(self, ids: list[int]) -> None:
        for i in ids:
            self.users[i] += 1

    def drop(self, ids: list[int]) -> None:
        for i in ids:
            self.users[i] -= 1
            if not self.users[i]:
                self.free.append(i)


class Chunk(NamedTuple):
    """The next `length` tokens of a request, computed in one step."""

    request: Request
    length: int


class Scheduler:
    """Admits requests, assigns pages, and fills each step with at most `token_budget` tokens.

    Generating requests go first, one token and `drafts` guesses each, so no stream waits for another request's prompt.
    The rest of the budget goes to prompts in the order of arrival; the last prompt is cut where the budget ends.
    """

    def __init__(self, num_pages: int, page_size: int, token_budget: int, max_running: int, drafts: int = 0) -> None:
        if token_budget < max_running * (1 + drafts):
            each = f" times {1 + drafts}" if drafts else ""
            raise ValueError(
                f"token_budget: at least max_running, {max_running}{each}, is required; got {token_budget}"
            )
        self.num_pages, self.page_size, self.drafts = num_pages, page_size, drafts
        self.token_budget, self.max_running = token_budget, max_running
        self.pages = Pool(num_pages)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0

    def add(self, request: Request) -> None:
        needs = self.pages_of(len(request.prompt) + request.max_new_tokens + self.drafts)
        if not request.prompt or needs > self.num_pages:
            raise ValueError(f"request: from 1 token to {self.num_pages} pages are required; got {needs} pages")
        self.waiting.append(request)

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def schedule(self, step: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        left = self.token_budget
        queue = deque(sorted(self.running, key=lambda r: r.missing > 1 + len(r.drafts)))
        while queue and left:
            request = queue.popleft()
            length = self.length(request, left)
            while not self._grow(request, length):  # pages ran out: preempt the last of the queue
                last = queue.pop() if queue else request
                self._preempt(last)
                if last is request:
                    break
            else:
                chunks.append(Chunk(request, length))
                left -= length
        while left and self._may_admit(step):
            request = self.waiting.popleft()
            self.admit(request)
            length = self.length(request, left)
            self._grow(request, length)
            chunks.append(Chunk(request, length))
            left -= length
        return chunks

    def length(self, request: Request, left: int) -> int:
        """Of the next chunk of a request, where so many tokens are left of the budget."""
        return min(left, request.missing)

    def admit(self, request: Request) -> None:
        self.running.append(request)

    def computed(self, request: Request, tokens: int) -> None:
        """Notes that so many more tokens of a request are in the cache; drafts that were wrong are not."""
        request.cached += tokens

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.drop(request.pages)
        request.pages = []

    def has_pages(self, count: int) -> bool:
        return count <= len(self.pages.free)

    def _may_admit(self, step: int) -> bool:
        """Whether the first waiting request fits with all its tokens and one more, so it is not preempted at once."""
        if not self.waiting or self.waiting[0].arrival > step or len(self.running) == self.max_running:
            return False
        return self.has_pages(self.pages_of(len(self.waiting[0].tokens) + 1 + self.drafts))

    def _grow(self, request: Request, length: int) -> bool:
        """Assigns pages for `length` more tokens; False if too few are free."""
        missing = max(0, self.pages_of(request.cached + length) - len(request.pages))
        if not self.has_pages(missing):
            return False
        request.pages += self.pages.take(missing)
        return True

    def _preempt(self, request: Request) -> None:
        """Frees its pages. It restarts later, with its generated tokens as part of the prompt."""
        self.finish(request)
        request.cached, request.drafts = 0, []
        self.waiting.appendleft(request)
        self.preemptions += 1


class StepTime(NamedTuple):
    """Token counts of a step, and the seconds from its schedule to its tokens on the host."""

    prompt_tokens: int
    generated_tokens: int
    seconds: float


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`linear`, whose rows have the same bits in any batch."""
    return fi_core.mm_bf16(x, weight.T, out_dtype=x.dtype)


class Engine:
    """Serves requests. cuda_graph: steps that only generate replay a graph, padded to max_running requests.

    batch_invariant: the logits of a request have the same bits whatever else is served, in 16 bits. All tokens go
    through prefill then, since decode adds in another order: a prompt may end in a chunk of one token, and generated
    tokens are computed again after a preemption.

    draft: guesses the next `scheduler.drafts` tokens of a request. A step computes the logits after each of them; a
    guess holds if it is the token that would be sampled there, so the text is the one without guesses.
    """

    def __init__(
        self,
        model: Any,
        scheduler: Scheduler,
        cuda_graph: bool = False,
        batch_invariant: bool = False,
        draft: Callable[[Request], list[int]] | None = None,
    ) -> None:
        self.model, self.scheduler, self.batch_invariant = model, scheduler, batch_invariant
        if cuda_graph and (batch_invariant or draft):
            name = "batch_invariant" if batch_invariant else "draft"
            raise ValueError(f"cuda_graph: False is required with {name}; got True")
        if bool(draft) != bool(scheduler.drafts):
            required = "a function" if scheduler.drafts else "None"
            raise ValueError(f"draft: {required} is required with {scheduler.drafts} drafts a step; got {draft!r}")
        model.multiply = product if batch_invariant else linear
        self.draft = draft
        shape = scheduler.num_pages, 2, scheduler.page_size, model.kv_heads, model.head_dim
        # NaN shows any read of an unwritten slot.
        self.caches = [torch.full(shape, torch.nan, dtype=model.dtype, device=model.device) for _ in model.layers]
        self.workspace = torch.empty(16 << 20, dtype=torch.uint8, device=model.device)
        self.prefill = fi_core.BatchPrefillWithPagedKVCacheWrapper(self.workspace)
        self.decode = fi_core.BatchDecodeWithPagedKVCacheWrapper(self.workspace)
        self.graph = DecodeGraph(self) if cuda_graph else None
        self.times: list[StepTime] = []

    @torch.inference_mode()
    def serve(self, requests: list[Request]) -> None:
        """Runs all requests to completion; their tokens are in `Request.tokens`."""
        for request in sorted(requests, key=lambda r: r.arrival):
            self.scheduler.add(request)
        step = 0
        with fi_core.batch_invariant() if self.batch_invariant else nullcontext():
            while self.scheduler.waiting or self.scheduler.running:
                self.step(step)
                step += 1

    def step(self, number: int) -> None:
        start = time.perf_counter()
        if self.draft:
            for request in self.scheduler.running:
                request.drafts = self.draft(request) if request.cached == len(request.tokens) - 1 else []
        chunks = self.scheduler.schedule(number)
        if not chunks:
            return
        # Requests that generate come first. Single tokens go to decode, the others to prefill.
        chunks.sort(key=lambda chunk: (not chunk.request.drafts, chunk.length > 1, not chunk.request.cached))
        is_whole = self.batch_invariant or self.draft
        batch, alone = self.batch(chunks), 0 if is_whole else sum(chunk.length == 1 for chunk in chunks)
        if self.graph and alone == len(chunks):
            logits = self.graph.run(batch)
        else:
            logits = self.model(batch, self.caches, self.plan(batch, chunks, alone))
        prompt_tokens = sum(min(c.length, max(0, len(c.request.prompt) - c.request.cached)) for c in chunks)
        generated = self.advance(chunks, logits)
        self.times.append(StepTime(prompt_tokens, generated, time.perf_counter() - start))

    def advance(self, chunks: list[Chunk], logits: torch.Tensor) -> int:
        """Appends the sampled tokens, up to the first draft that does not hold; returns their number."""
        whole = [chunk.request for chunk in chunks if chunk.length == chunk.request.missing]
        sampled, generated = iter(zip(self.sample(logits, whole), logits)), 0
        for request, length in chunks:
            if length < request.missing:
                self.scheduler.computed(request, length)
                continue
            drafts, request.drafts = request.drafts, []
            rows = [next(sampled) for _ in range(1 + len(drafts))]
            right = next((i for i, draft in enumerate(drafts) if draft != rows[i][0]), len(drafts))
            rows = rows[: min(1 + right, request.max_new_tokens - len(request.generated))]
            self.scheduler.computed(request, length - len(drafts) + len(rows) - 1)
            request.tokens += [token for token, _ in rows]
            generated += len(rows)
            if request.logits is not None:
                request.logits += [row.clone() for _, row in rows]
            if len(request.generated) == request.max_new_tokens:
                self.scheduler.finish(request)
        return generated

    def batch(self, chunks: list[Chunk]) -> Batch:
        """The tensors of a step, copied to the device in one transfer."""
        requests = [chunk.request for chunk in chunks]
        lengths = [chunk.request.cached + chunk.length for chunk in chunks]
        rows = list(accumulate((chunk.length for chunk in chunks), initial=0))
        whole = [(r, end) for (r, length), end in zip(chunks, rows[1:]) if length == r.missing]
        pages = [r.pages[: self.scheduler.pages_of(length)] for r, length in zip(requests, lengths)]
        lists = (
            [token for r, length in zip(requests, lengths) for token in (r.tokens + r.drafts)[r.cached : length]],
            rows,
            lengths,
            list(chain(*pages)),
            list(accumulate(map(len, pages), initial=0)),
            [(length - 1) % self.scheduler.page_size + 1 for length in lengths],
            [row for r, end in whole for row in range(end - 1 - len(r.drafts), end)],
        )
        packed = torch.tensor(list(chain(*lists)), dtype=torch.int32).to(self.model.device)
        tokens, row_indptr, kv_lens, indices, *tables, outputs = packed.split([len(values) for values in lists])
        owners, positions = fi_core.get_batch_indices_positions(row_indptr, kv_lens, len(tokens))
        return Batch(tokens, positions, owners, row_indptr[1:] - 1, outputs, indices, *tables)

    def plan(self, batch: Batch, chunks: list[Chunk], alone: int) -> Attention:
        """Plans attention of this step: the first `alone` requests have one row, the others a chunk of a prompt."""
        m = self.model
        shape = m.heads, m.kv_heads, m.head_dim, self.scheduler.page_size
        if alone:
            tables = batch.indptr[: alone + 1], batch.indices, batch.last_page_len[:alone]
            self.decode.plan(*tables, *shape, q_data_type=m.dtype)
        if alone < len(chunks):
            rows = torch.cat([batch.last_rows.new_zeros(1), batch.last_rows[alone:] + (1 - alone)])
            tables = rows, batch.indptr[alone:], batch.indices, batch.last_page_len[alone:]
            self.prefill.plan(*tables, *shape, causal=True, q_data_type=m.dtype)

        def attend(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            out = q.new_empty(q.shape)
            if alone:
                self.decode.run(q[:alone], cache, out=out[:alone])
            if alone < len(chunks):
                self.prefill.run(q[alone:], cache, out=out[alone:])
            return out

        return attend

    def sample(self, logits: torch.Tensor, requests: list[Request]) -> list[int]:
        """Samples the next token of each request, and after each of its drafts. Waits for the device."""
        if not requests:
            return []
        # Seed and offset are the request's own, so its text does not depend on the other requests.
        rows = [(r, len(r.tokens) + i) for r in requests for i in range(1 + len(r.drafts))]
        seeds, offsets = torch.tensor([[r.seed for r, _ in rows], [at for _, at in rows]]).to(logits.device)
        ways = torch.tensor([[r.temperature for r, _ in rows], [r.top_p for r, _ in rows]]).to(logits.device)
        tokens, _ = fi_core.sample_from_logits(logits, temperature=ways[0], top_p=ways[1], seed=seeds, offset=offsets)
        return tokens.tolist()


class DecodeGraph:
    """The forward pass of one token a request, captured once for the largest batch."""

    def __init__(self, engine: Engine) -> None:
        self.engine, m, requests = engine, engine.model, engine.scheduler.max_running

        def zeros(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=m.device)

        last_rows = torch.arange(requests, dtype=torch.int32, device=m.device)
        pages = engine.scheduler.num_pages
        tables = zeros(pages), zeros(requests + 1), zeros(requests)
        self.batch = Batch(zeros(requests), zeros(requests), zeros(requests) - 1, last_rows, last_rows, *tables)
        self.decode = fi_core.BatchDecodeWithPagedKVCacheWrapper(
            engine.workspace,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self.batch.indptr,
            paged_kv_indices_buffer=self.batch.indices,
            paged_kv_last_page_len_buffer=self.batch.last_page_len,
        )
        self.plan(self.batch)
        with torch.inference_mode():
            self.forward()  # loads or compiles the kernels before the capture
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self.forward()

    def forward(self) -> torch.Tensor:
        return self.engine.model(self.batch, self.engine.caches, self.decode.run)

    def plan(self, batch: Batch) -> None:
        m = self.engine.model
        shape = m.heads, m.kv_heads, m.head_dim, self.engine.scheduler.page_size
        self.decode.plan(batch.indptr, batch.indices, batch.last_page_len, *shape, q_data_type=m.dtype)

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of the outputs of single rows. Padding requests have no pages, and their rows have owner -1."""
        count = len(batch.tokens)
        self.batch.owners.fill_(-1)
        for name in ("tokens", "positions", "owners"):
            getattr(self.batch, name)[:count] = getattr(batch, name)
        missing = len(self.batch.tokens) - count
        if missing:
            indptr = torch.cat([batch.indptr, batch.indptr[-1:].expand(missing)])
            last_page_len = torch.cat([batch.last_page_len, batch.last_page_len.new_zeros(missing)])
            batch = batch._replace(indptr=indptr, last_page_len=last_page_len)
        self.plan(batch)
        self.graph.replay()
        return self.logits[:count] if len(batch.outputs) == count else self.logits[batch.outputs]
