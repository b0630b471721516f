"""Token-exact proofs: whole sequences, decoded with and without speculation from the same seeds.

Shape legend: B requests, N nodes, K children, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exactness.models import tree_parents
from rollout_spec.noise import Stream, gumbel_noise
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verify import CounterNoise, DenseTarget, Scheme, VerifyFn

# (last tokens [B], absolute positions of the next tokens, seeds) -> trees
Propose = Callable[[Tensor, Sequence[int], Sequence[int]], DraftTree]


def bigram(vocab_size: int, seed: int, temperature: float = 1.0) -> Tensor:
    """[V, V] float32: the law of the next token after each token; temperature 0 makes point masses."""
    logits = 2.0 * torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed))
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), vocab_size).float()
    return (logits / temperature).softmax(-1)


def decode(
    verify: VerifyFn, scheme: Scheme, target: Tensor, seeds: Sequence[int], num_tokens: int, propose: Propose | None
) -> tuple[list[list[int]], int]:
    """The first num_tokens tokens of each request after token 0, and how many rounds it took all of them. None drafts nothing."""
    outputs: list[list[int]] = [[] for _ in seeds]
    num_rounds = 0
    while any(len(output) < num_tokens for output in outputs):
        last = torch.tensor([output[-1] if output else 0 for output in outputs])
        positions = [5 + len(output) for output in outputs]
        tree = propose(last, positions, seeds) if propose else DraftTree.empty(len(seeds))
        contexts = torch.cat([last[:, None], tree.token_ids], dim=1)
        verdict = verify(tree, DenseTarget(target[contexts]), CounterNoise(seeds, positions), scheme)
        for output, tokens in zip(outputs, verdict.emitted(tree).tolist(), strict=True):
            output += [token for token in tokens if token >= 0]
        num_rounds += 1
    return [output[:num_tokens] for output in outputs], num_rounds


def proposer(draft: Tensor, widths: Sequence[int], draw: Draw) -> Propose:
    """Trees of full shape from a bigram drafter [V, V]; random draws are torch's global ones, which verifiers never touch."""
    parents = tree_parents(widths)

    def propose(last: Tensor, positions: Sequence[int], seeds: Sequence[int]) -> DraftTree:
        batch, vocab_size = last.numel(), draft.shape[0]
        tokens: list[Tensor] = []
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if node and parent == parents[node - 1]:
                continue  # drawn together with its first sibling
            depth = 0 if parent < 0 else depths[parent] + 1
            scores = draft[last if parent < 0 else tokens[parent]].log()
            if draw is Draw.GUMBEL:
                scores = scores + gumbel_noise(seeds, [position + depth for position in positions], vocab_size, Stream.TARGET)
            elif draw is not Draw.DETERMINISTIC:
                scores = scores - torch.empty(batch, vocab_size).exponential_().log()
            width = parents.count(parent)
            tokens += list(scores.topk(width, dim=-1).indices.T)
            depths += [depth] * width
        above = [last if parent < 0 else tokens[parent] for parent in parents]
        return DraftTree(
            token_ids=torch.stack(tokens, dim=1),
            parents=torch.tensor(parents).expand(batch, -1),
            num_nodes=torch.full((batch,), len(parents)),
            draw=draw,
            draft_probs=None if draw is Draw.DETERMINISTIC else draft[torch.stack(above, dim=1)],
        )

    return propose
