"""StateLedger: the target's hidden states on their way from vLLM's forwards to a drafter, request by request from position 0.

Where vLLM takes a prompt's beginning from its prefix cache no forward shows those states; they are remembered from the request that
computed them. A request of which some are missing is *blind*: it is not drafted for.

Shape legend: R rows of a forward, H hidden size.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rollout_spec.drafter import TargetStates
from rollout_spec.engine.states import StatePile, target_states

States = Mapping[int, Tensor]  # layer -> [R, H]


@dataclass(frozen=True, kw_only=True, eq=False)
class NewStates:
    """Of one request: the states that a forward computed of its tokens from position ``first`` on and that are committed."""

    request_id: str
    token_ids: Sequence[int]  # of the request so far
    num_prompt_tokens: int
    first: int
    states: States


@dataclass(kw_only=True)
class _Line:
    """Of one running request."""

    end: int = 0  # states of positions below were seen
    prompt: dict[int, list[Tensor]] = field(default_factory=dict)  # the prompt's, until it is complete
    pile: StatePile = field(default_factory=StatePile)


class StateLedger:
    """``add`` every forward's states, ``take`` what is pending. Without layers it does nothing."""

    def __init__(self, layers: tuple[int, ...], *, block_size: int, max_tokens: int) -> None:
        self.layers = layers
        self._lines: dict[str, _Line] = {}
        self._prefixes = _Prefixes(block_size, max_tokens)

    def add(self, new: Sequence[NewStates]) -> None:
        """Requests that begin behind a cached prefix may take it from one of the same forward, which begins before them."""
        if self.layers:
            for rows in sorted(new, key=lambda rows: rows.first):
                self._add(rows)

    def _add(self, new: NewStates) -> None:
        count = next(iter(new.states.values())).shape[0]
        line = self._lines.get(new.request_id)
        if line is None or line.end != new.first:
            begun = self._begin(new)
            if begun is None:
                self._lines.pop(new.request_id, None)
                return
            line = self._lines[new.request_id] = begun
        line.pile.add(range(new.first, new.first + count), dict(new.states))
        line.end = new.first + count
        if new.first < new.num_prompt_tokens:
            for layer in self.layers:
                line.prompt.setdefault(layer, []).append(new.states[layer])
            self._prefixes.add(new.token_ids[: line.end], {layer: torch.cat(parts) for layer, parts in line.prompt.items()})
        if line.end >= new.num_prompt_tokens:
            line.prompt = {}

    def _begin(self, new: NewStates) -> _Line | None:
        """A line up to the first new state; None if what lies before it is not known."""
        if new.first == 0:
            return _Line()
        known = self._prefixes.find(new.token_ids, new.first)
        if known is None:
            return None
        line = _Line(end=new.first, prompt={layer: [known[layer]] for layer in self.layers})
        line.pile.add(range(new.first), dict(known))
        return line

    def is_blind(self, request_id: str) -> bool:
        return bool(self.layers) and request_id not in self._lines

    def take(self, request_ids: Sequence[str]) -> TargetStates | None:
        """Everything pending of these requests, none of them blind; None if no layer is asked for."""
        if not self.layers:
            return None
        piles = []
        for request_id in request_ids:
            line = self._lines[request_id]
            piles.append(line.pile)
            line.pile = StatePile()
        return target_states(piles, self.layers)

    def drop(self, request_id: str) -> None:
        self._lines.pop(request_id, None)

    def clear(self) -> None:
        """The target's weights changed: every state is of the old ones."""
        self._lines.clear()
        self._prefixes.clear()


class _Prefixes:
    """States of the latest prompts, found by any whole number of the prefix cache's blocks that they begin with."""

    def __init__(self, block_size: int, max_tokens: int) -> None:
        self._block_size, self._max_tokens = block_size, max_tokens
        self._states: OrderedDict[bytes, States] = OrderedDict()  # by the longest key, least recently used first
        self._longest: dict[bytes, bytes] = {}  # key of a prefix -> that of a prompt that begins with it
        self._num_tokens = 0

    def add(self, token_ids: Sequence[int], states: States) -> None:
        """states of all token_ids."""
        keys = list(self._keys(token_ids))
        if not keys or len(token_ids) > self._max_tokens:
            return
        for key in keys:
            self._forget(key)  # of the same prompt, so far
        name = keys[-1]
        self._states[name] = states
        self._num_tokens += len(token_ids)
        self._longest.update(dict.fromkeys(keys, name))
        while self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._states)))

    def find(self, token_ids: Sequence[int], length: int) -> States | None:
        """States of the first ``length`` tokens, or None."""
        blocks = -(-length // self._block_size)
        *_, key = (b"", *self._keys(token_ids[: blocks * self._block_size]))
        name = self._longest.get(key)
        held = None if name is None else self._states.get(name)
        if name is None or held is None or next(iter(held.values())).shape[0] < length:
            return None
        self._states.move_to_end(name)
        return {layer: tensor[:length] for layer, tensor in held.items()}

    def clear(self) -> None:
        self._states.clear()
        self._longest.clear()
        self._num_tokens = 0

    def _forget(self, name: bytes) -> None:
        held = self._states.pop(name, None)
        if held is not None:
            self._num_tokens -= next(iter(held.values())).shape[0]
            self._longest = {key: owner for key, owner in self._longest.items() if owner != name}

    def _keys(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """A digest of each prefix of whole blocks."""
        digest = hashlib.blake2b(digest_size=16)
        for begin in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            digest.update(np.asarray(token_ids[begin : begin + self._block_size], dtype=np.int64).tobytes())
            yield digest.digest()
