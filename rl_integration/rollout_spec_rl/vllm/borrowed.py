"""What a trained drafter borrows of the policy that vLLM runs: embedding, output head and final norm, followed through updates.

Shape legend: V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rollout_spec.engine.runner import CausalLM
from rollout_spec.engine.shell import policy_shell


class BorrowedEnds:
    """Shares the storage of vLLM's tensors where that stays the same through updates, and copies where it does not."""

    def __init__(self, target: Any, checkpoint: str) -> None:
        """target: vLLM's model. Raises ValueError for a model whose ends are not where a decoder's usually are."""
        self._target = target
        ends = self._ends()
        self._kept = ends
        self.module: CausalLM = policy_shell(checkpoint, embedding=ends["embedding"], head=ends["head"], final_norm=ends["final_norm"])

    def refresh(self) -> None:
        """After the target's weights changed."""
        for name, tensor in self._ends().items():
            held = self._kept[name]
            if held.data_ptr() != tensor.data_ptr():
                held.copy_(tensor)

    def _ends(self) -> dict[str, Tensor]:
        """[V, H] embedding and head without the rows that vLLM pads them with, [H] final norm."""
        target = self._target
        try:
            body, vocab_size = target.model, target.config.vocab_size
            head = body.embed_tokens if target.config.tie_word_embeddings else target.lm_head
            embedding, final_norm = body.embed_tokens.weight, body.norm.weight
        except AttributeError as error:
            raise ValueError(
                f"a trained drafter borrows embedding, head and final norm, which {type(target).__name__} keeps elsewhere ({error}): "
                "use the suffix drafter with this model"
            ) from None
        if getattr(head, "bias", None) is not None:
            raise ValueError("drafters borrow the policy's output head, and one with a bias is not supported")
        return {
            "embedding": embedding.detach()[:vocab_size],
            "head": head.weight.detach()[:vocab_size],
            "final_norm": final_norm.detach(),
        }
