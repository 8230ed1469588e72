"""A prefix cache for the engine of serving.py, for models whose layers keep KV pages, states, or both.

A state, unlike a page, holds all tokens so far, so it can be shared at a few points only. Prompts are cut there, at
multiples of `block` tokens: the state after the chunk goes to a slot that stays as it is, the next chunk reads it from
there and writes to a slot of its request. A request that begins with the same tokens takes the pages and the slot.
A request that generates has a slot for the state after each of its tokens of a step, and goes on from the one behind
the last draft that holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from serving import Chunk, Engine, Pool, Request, Scheduler


class Prefix(NamedTuple):
    """Where the first tokens of a prompt are kept."""

    pages: list[int]
    slot: int


@dataclass
class Slots:
    """The states of a running request, by the ids of their slots."""

    own: list[int]  # one for each token of a step that generates
    after: list[int]  # where the states after the tokens of the last step are, or one state, in all places
    accepted: int = 1  # of these tokens
    decodes: bool = False  # in this step
    shared: int | None = None  # the slot of a prefix that it reads

    @property
    def last(self) -> int:
        """The slot of the state after the last token."""
        return self.after[self.accepted - 1]


class PrefixScheduler(Scheduler):
    """Keeps prefixes of prompts, and drops the one used least recently where there are too many or pages run out."""

    def __init__(self, *sizes: int, drafts: int = 0, block: int = 64, num_prefixes: int = 8) -> None:
        """block: tokens, a multiple of a page, and of 64 where no bit may change. num_prefixes: that are kept."""
        super().__init__(*sizes, drafts=drafts)
        if block % self.page_size:
            raise ValueError(f"block: a multiple of the page size, {self.page_size}, is required; got {block}")
        self.block, self.num_prefixes = block, num_prefixes
        # A request may read a prefix that is kept no more, and write another one.
        self.slots = Pool(1 + self.max_running * (1 + drafts + 2) + num_prefixes)
        (self.zeros,) = self.slots.take(1)  # the state before the first token
        self.states: dict[Request, Slots] = {}
        self.targets: dict[Request, int] = {}  # of this step: the slots that states after a block go to
        self.prefixes: dict[tuple[int, ...], Prefix] = {}  # the one used last is the last
        self.reused = 0  # tokens

    def schedule(self, step: int) -> list[Chunk]:
        self.targets = {}
        chunks = super().schedule(step)
        for request, length in chunks:
            end, has_all = request.cached + length, len(request.drafts) == self.drafts
            decodes = bool(request.cached) and has_all and length == 1 + self.drafts
            self.states[request].decodes = decodes
            is_known = end % self.block != 0 or tuple(request.tokens[:end]) in self.prefixes
            if self.num_prefixes and not decodes and not is_known:
                (self.targets[request],) = self.slots.take(1)
        return chunks

    def length(self, request: Request, left: int) -> int:
        """Up to the last multiple of a block, if there is one."""
        length = super().length(request, left)
        end = request.cached + length
        cut = end - end % self.block - request.cached
        return cut if cut > 0 and not request.drafts else length

    def admit(self, request: Request) -> None:
        super().admit(request)
        own = self.slots.take(1 + self.drafts)
        state = self.states[request] = Slots(own, [self.zeros] * len(own))
        for count in range((len(request.tokens) - 1) // self.block * self.block, 0, -self.block):
            key = tuple(request.tokens[:count])
            if key in self.prefixes:
                prefix = self.prefixes[key] = self.prefixes.pop(key)
                self.pages.hold(prefix.pages)
                request.pages, request.cached = list(prefix.pages), count
                self._share(state, prefix.slot)
                self.reused += count
                return

    def computed(self, request: Request, tokens: int) -> None:
        super().computed(request, tokens)
        state, key = self.states[request], tuple(request.tokens[: request.cached])
        target = self.targets.get(request)
        self._share(state, target)
        if target is None:
            state.after = list(state.own) if state.decodes else state.own[:1] * len(state.own)
            state.accepted = tokens if state.decodes else 1
        elif key in self.prefixes:  # of another request of this step
            self.slots.drop([target])
        else:
            prefix = self.prefixes[key] = Prefix(request.pages[: request.cached // self.page_size], target)
            self.pages.hold(prefix.pages)
            if len(self.prefixes) > self.num_prefixes:
                self._drop_oldest()

    def finish(self, request: Request) -> None:
        super().finish(request)
        state = self.states.pop(request)
        self._share(state, None)
        self.slots.drop(state.own)

    def has_pages(self, count: int) -> bool:
        while len(self.pages.free) < count and self.prefixes:
            self._drop_oldest()
        return super().has_pages(count)

    def clear(self) -> None:
        """Drops all prefixes."""
        while self.prefixes:
            self._drop_oldest()

    def _share(self, state: Slots, slot: int | None) -> None:
        """Makes a slot that others may read the last state of a request, in place of the one before."""
        if slot is not None:
            self.slots.hold([slot])
            state.after, state.accepted = [slot] * len(state.own), 1
        if state.shared is not None:
            self.slots.drop([state.shared])
        state.shared = slot

    def _drop_oldest(self) -> None:
        prefix = self.prefixes.pop(next(iter(self.prefixes)))
        self.pages.drop(prefix.pages)
        self.slots.drop([prefix.slot])


class Step(NamedTuple):
    """Where the layers of a step find states. The first `decodes` requests have `width` tokens each, and a state is
    kept after each of them; the others have a chunk of a prompt. All tensors are int32 on the device.
    """

    decodes: int
    width: int
    after: torch.Tensor  # [requests, width], Slots.after
    own: torch.Tensor  # [requests, width], Slots.own
    accepted: torch.Tensor  # [requests]
    read: torch.Tensor  # [requests], the slot of the state before the chunk
    write: torch.Tensor  # [requests], that after it
    zeros: torch.Tensor  # [requests], 0
    ones: torch.Tensor  # [requests], 1
    first: int  # the slot of the state before the first token


class StateEngine(Engine):
    """Serves a model whose layers keep states in pools of `model.slots` slots, from a PrefixScheduler."""

    def __init__(self, model: Any, scheduler: PrefixScheduler, **options: Any) -> None:
        super().__init__(model, scheduler, **options)
        model.reset(len(scheduler.slots.users))

    def batch(self, chunks: list[Chunk]) -> Any:
        states, width = [self.scheduler.states[chunk.request] for chunk in chunks], 1 + self.scheduler.drafts
        rows = [
            [*s.after, *s.own, s.accepted, s.last, self.scheduler.targets.get(c.request, s.own[0]), 0, 1]
            for s, c in zip(states, chunks)
        ]
        table = torch.tensor(rows, dtype=torch.int32).to(self.model.device)
        after, own, numbers = table.split([width, width, 5], 1)
        first = self.scheduler.zeros
        self.model.step = Step(sum(s.decodes for s in states), width, after, own, *numbers.T.contiguous(), first)
        return super().batch(chunks)

    def plan(self, *step: Any) -> Any:
        """Nothing: the layers read pages by their tables."""
        return None
