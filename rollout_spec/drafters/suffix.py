"""Suffix drafter: continue as the request, its sibling samples or earlier epochs of its prompt continued the same context.

Shape legend: B requests, T tokens of a request so far, N nodes, S states of a suffix automaton.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, DrafterNeeds, RequestView
from rollout_spec.drafters.history import HistoryStore
from rollout_spec.drafters.nodes import Nodes, pack
from rollout_spec.drafters.suffix_automaton import ROOT, SuffixAutomaton
from rollout_spec.tree import NO_PARENT, DraftTree
from rollout_spec.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class SuffixConfig:
    """Settings of the suffix drafter."""

    min_match_length: int = 2  # shortest context that is looked up
    max_nodes: int = 64  # of one request's tree
    min_path_prob: float = 0.05  # stop where a path's estimated probability of acceptance falls below
    novelty: float = 0.25  # weight of "a token never seen after this context" beside the counted ones
    version_decay: float = 0.7  # weight of an occurrence for each weights version since
    trust_prior: float = 0.9  # acceptance of a certain-looking token expected before anything was observed ...
    trust_prior_tokens: float = 4.0  # ... and how many drafted tokens that belief is worth
    trust_decay: float = 0.9  # what earlier rounds of a request still count after another one
    shared_trust_decay: float = 0.995  # the same for rounds of all requests, from which new requests take their prior
    trust_floor: float = 0.1  # trust never falls below: without a draft nothing more would be learnt
    max_history_tokens: int = 20_000_000  # 4 bytes each
    max_history_tokens_per_prompt: int = 32_768  # all of them go into an automaton (~ .5 kB a token) while the prompt runs

    def __post_init__(self) -> None:
        if self.min_match_length < 1 or self.max_nodes < 1:
            raise ValueError(f"min_match_length and max_nodes must be positive, got {self.min_match_length} and {self.max_nodes}")
        for name in ("min_path_prob", "version_decay", "trust_prior", "trust_decay", "shared_trust_decay", "trust_floor"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        if not self.novelty > 0 or not self.trust_prior_tokens > 0:
            raise ValueError(f"novelty and trust_prior_tokens must be > 0, got {self.novelty} and {self.trust_prior_tokens}")
        if self.max_history_tokens < 0 or self.max_history_tokens_per_prompt < 0:
            raise ValueError("max_history_tokens and max_history_tokens_per_prompt must be 0 (no history) or more")


class SuffixDrafter:
    """Drafts from a suffix automaton over (i) the request itself, (ii) its prompt's other running and finished samples, (iii)
    the prompt's samples of earlier epochs, recent weights versions counting more (cf. SuffixDecoding, Oliaro et al. 2024).

    From the longest known suffix of the request's tokens, token c with child weight w_c among W = Σ w gets the estimate
    ``w_c / (W + novelty)``; what is left falls to the next shorter suffix, as in prediction by partial matching (Cleary &
    Witten 1984). A request's trust, the running share of its drafted tokens that were accepted, scales every step. Nodes are
    taken best first by the product along their path, the expected number of accepted tokens being its sum over the tree
    (exact match: E[len] = Σ p(path n)), down to ``min_path_prob``.

    A proposal is a function of tokens and verdicts committed before it, never of what the target is about to sample.
    """

    name = "suffix"
    vocab_size: int | None = None

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self.config = config or SuffixConfig()
        self.needs = DrafterNeeds()
        self.history = HistoryStore(
            max_tokens=self.config.max_history_tokens, max_tokens_per_prompt=self.config.max_history_tokens_per_prompt
        )
        self._version = 0
        self._prompts: dict[str, _RunningPrompt] = {}
        self._requests: dict[str, _RunningRequest] = {}
        # Over all requests: the prior of the next one.
        self._trust = _Trust(self.config, prior=self.config.trust_prior, decay=self.config.shared_trust_decay)

    def start(self, request: RequestView) -> None:
        """Begin, or after a preemption go on with, a request; the first of a prompt makes the prompt's automaton from history."""
        if request.request_id not in self._requests:
            prompt = self._prompts.get(request.prompt_key)
            if prompt is None:
                prompt = self._prompts[request.prompt_key] = self._load_prompt(request)
            prompt.num_running += 1
            state, num_read = prompt.enter(request)
            self._requests[request.request_id] = _RunningRequest(
                prompt, state, num_read, _Trust(self.config, prior=self._trust.rate, decay=self.config.trust_decay)
            )
        self._requests[request.request_id].read(request.token_ids)

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """[B, N] deterministic trees. ValueError for a request that was not started."""
        if context.weights_version != self._version:
            self.target_updated(context.weights_version)
        running = []
        for request in context.requests:
            if request.request_id not in self._requests:
                raise ValueError(f"request {request.request_id!r} was never started with the suffix drafter, or has finished")
            running.append(self._requests[request.request_id])
        # All read before any drafts, so that siblings see each other's latest tokens whatever their order.
        for request, state in zip(context.requests, running, strict=True):
            state.read(request.token_ids)
        lengths = budget.draft_lengths.tolist()
        return pack(
            [self._draft(state, length, budget) for state, length in zip(running, lengths, strict=True)], budget.draft_lengths.device
        )

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Verdict) -> None:
        """Update each request's trust by how many of its drafted tokens were accepted before the first refused one."""
        num_nodes, num_accepted, is_bonus = tree.num_nodes.tolist(), verdict.num_accepted.tolist(), verdict.is_bonus.tolist()
        for request, drafted, accepted, bonus in zip(context.requests, num_nodes, num_accepted, is_bonus, strict=True):
            running = self._requests.get(request.request_id)
            if running is not None and drafted:
                tried = accepted + (not bonus)
                running.trust.observe(accepted, tried)
                self._trust.observe(accepted, tried)

    def finish(self, request: RequestView) -> None:
        """Keep what the request emitted (an aborted one's part too) for its siblings and for later epochs."""
        running = self._requests.pop(request.request_id, None)
        if running is None:
            return
        running.read(request.token_ids)
        self.history.add(request.prompt_key, request.token_ids[request.num_prompt_tokens :], self._version)
        running.prompt.num_running -= 1
        if running.prompt.num_running == 0:
            del self._prompts[request.prompt_key]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:  # noqa: ARG002
        raise ValueError("the suffix drafter has no weights to update")

    def target_updated(self, version: int) -> None:
        """Age what was seen under earlier weights."""
        age = max(0, version - self._version)
        for prompt in self._prompts.values():
            prompt.automaton.scale_weights(self.config.version_decay**age)
        self._version = version

    def save_history(self, path: Path) -> None:
        """Write the finished samples to a file, all or nothing."""
        self.history.save(path)

    def load_history(self, path: Path) -> None:
        """Add the finished samples of a file (see ``HistoryStore.load``)."""
        self.history.load(path, self._version)

    def _load_prompt(self, request: RequestView) -> _RunningPrompt:
        prompt = _RunningPrompt(request.token_ids[: request.num_prompt_tokens])
        for sample in self.history.samples(request.prompt_key):
            weight = sample.count * self.config.version_decay ** max(0, self._version - sample.version)
            prompt.write(prompt.prompt_state, sample.token_ids.tolist(), weight)
        return prompt

    def _draft(self, running: _RunningRequest, length: int, budget: Budget) -> Nodes:
        nodes = Nodes()
        max_nodes, threshold, trust = self.config.max_nodes, self.config.min_path_prob, running.trust.rate
        # (-probability, order of discovery, depth, parent, token, state); the order settles ties and keeps them reproducible.
        heap: list[tuple[float, int, int, int, int, int]] = []
        num_found = 0
        node, depth, prob, state = NO_PARENT, 0, 1.0, running.state
        while len(nodes) < max_nodes:
            if depth < length:
                for token, child, share in self._continuations(running.prompt.automaton, state, budget.width_at(depth)):
                    child_prob = prob * trust * share
                    if child_prob >= threshold:
                        num_found += 1
                        heapq.heappush(heap, (-child_prob, num_found, depth + 1, node, token, child))
            if not heap:
                break
            negative, _, depth, parent, token, state = heapq.heappop(heap)
            prob = -negative
            node = nodes.add(token, parent)
        return nodes

    def _continuations(self, automaton: SuffixAutomaton, state: int, width: int) -> list[tuple[int, int, float]]:
        """Up to ``width`` (token, next state, estimated probability) after the contexts of ``state``, longest context first."""
        found: list[tuple[int, int, float]] = []
        seen: set[int] = set()
        weights = automaton.weights
        left = 1.0
        while state != ROOT and automaton.lengths[state] >= self.config.min_match_length:
            children = automaton.next_states[state]
            if children:
                total = sum([weights[child] for child in children.values()]) + self.config.novelty
                ranked = list(children.items())
                if len(ranked) > 1:
                    ranked.reverse()  # and a stable sort: among equals, the continuation that was first seen last
                    ranked.sort(key=lambda item: -weights[item[1]])
                for token, child in ranked:
                    if token not in seen:
                        found.append((token, child, left * weights[child] / total))
                        if len(found) == width:
                            return found
                        seen.add(token)
                left *= self.config.novelty / total
            state = automaton.links[state]
        return found


class _Trust:
    """Share of drafted tokens that were accepted: a prior worth some tokens, and rounds that fade as others follow."""

    def __init__(self, config: SuffixConfig, *, prior: float, decay: float) -> None:
        self._config = config
        self._prior = prior
        self._decay = decay
        self._accepted = 0.0
        self._tried = 0.0

    @property
    def rate(self) -> float:
        strength = self._config.trust_prior_tokens
        return max(self._config.trust_floor, (strength * self._prior + self._accepted) / (strength + self._tried))

    def observe(self, accepted: int, tried: int) -> None:
        self._accepted = self._decay * self._accepted + accepted
        self._tried = self._decay * self._tried + tried


class _RunningPrompt:
    """The automaton that a prompt's running samples share: prompt, history and what they have emitted so far."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.automaton = SuffixAutomaton()
        self.num_running = 0
        self._prompt_token_ids = list(prompt_token_ids)
        self.prompt_state = self.write(ROOT, self._prompt_token_ids, 1.0)

    def write(self, state: int, token_ids: Sequence[int], weight: float) -> int:
        """Append tokens to the text with prefix ``state``; returns the state of the longer prefix."""
        extend = self.automaton.extend
        for token in token_ids:
            state = extend(state, token, weight)
        return state

    def enter(self, request: RequestView) -> tuple[int, int]:
        """Prefix state of a new request and how many of its tokens it covers: the prompt's, unless it came with another prompt."""
        num_prompt = request.num_prompt_tokens
        same = num_prompt == len(self._prompt_token_ids) and list(request.token_ids[:num_prompt]) == self._prompt_token_ids
        return (self.prompt_state, num_prompt) if same else (ROOT, 0)


@dataclass
class _RunningRequest:
    prompt: _RunningPrompt
    state: int  # of all tokens read so far
    num_read: int
    trust: _Trust

    def read(self, token_ids: Sequence[int]) -> None:
        """Write the tokens that are new since the last call into the prompt's automaton."""
        new = token_ids[self.num_read :]
        self.state = self.prompt.write(self.state, new, 1.0)
        self.num_read += len(new)
