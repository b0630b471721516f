"""Model runners against transformers' own forward: prefill, chunks, trees, moves."""

from __future__ import annotations

import pytest
import torch
from tiny import SIZES, VOCAB, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GraniteConfig, Olmo2Config, Phi3Config, PreTrainedConfig, Starcoder2Config

from rollout_spec.engine.decoder import FusedDecoder, is_fusable
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.ops import Ops, TorchOps
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.rounds import round_input
from rollout_spec.engine.runner import ModelRunner, StepInput
from rollout_spec.engine.transformers_runner import TransformersRunner
from rollout_spec.tree import DraftTree, Draw
from rollout_spec_kernels.cpu import CpuOps, unavailable_reason

# float32 sums in another order: a few units in the last place of values of order ten.
TOLERANCE = 2e-4

VARIANTS = [
    ("llama", {}),
    ("llama", {"tied": True}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 6}),
]


def every_ops() -> list[Ops]:
    """torch's operations, and the C++ ones where they can be built."""
    return [TorchOps()] if unavailable_reason() is not None else [TorchOps(), CpuOps()]


def runners(kind: str, changes: dict[str, object]) -> list[ModelRunner]:
    return [
        make_runner(tiny_model(kind, **changes), max_context=128, fused=fused, ops=ops) for fused in (True, False) for ops in every_ops()
    ]


def span(tokens: Tensor, start: int, end: int, slot: int) -> StepInput:
    return StepInput(
        token_ids=tokens[start:end],
        positions=torch.arange(start, end),
        plan=AttentionPlan(row_offsets=torch.tensor([0, end - start]), slots=torch.tensor([slot]), context_lengths=torch.tensor([start])),
    )


@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
def test_prefill_in_chunks_equals_transformers(kind: str, changes: dict[str, object]) -> None:
    tokens = torch.randint(3, VOCAB, (23,))
    with torch.inference_mode():
        wanted = tiny_model(kind, **changes)(tokens[None]).logits[0]
    for runner in runners(kind, changes):
        kv = runner.make_slots(3, 64)
        parts = [runner.logits(runner.forward(span(tokens, a, b, slot=1), kv).hidden) for a, b in ((0, 9), (9, 10), (10, 23))]
        torch.testing.assert_close(torch.cat(parts), wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
def test_every_tree_node_sees_its_own_path(kind: str, changes: dict[str, object]) -> None:
    contexts = [torch.randint(3, VOCAB, (n,)) for n in (12, 5)]
    tree = DraftTree(
        token_ids=torch.tensor([[7, 8, 9, 10, 11], [20, 21, 22, 0, 0]]),
        parents=torch.tensor([[-1, -1, 0, 2, 1], [-1, 0, 0, -1, -1]]),
        num_nodes=torch.tensor([5, 3]),
        draw=Draw.DETERMINISTIC,
    )
    reference = tiny_model(kind, **changes)
    for runner in runners(kind, changes):
        kv = runner.make_slots(2, 64)
        for slot, context in enumerate(contexts):
            runner.forward(span(context, 0, len(context) - 1, slot), kv)
        lengths = torch.tensor([len(context) - 1 for context in contexts])
        step = round_input(tree, torch.stack([context[-1] for context in contexts]), lengths, torch.arange(2))
        logits = runner.logits(runner.forward(step, kv).hidden)
        row = 0
        for b, context in enumerate(contexts):
            for node in range(-1, int(tree.num_nodes[b])):
                path, at = [], node
                while at >= 0:
                    path.append(int(tree.token_ids[b, at]))
                    at = int(tree.parents[b, at])
                with torch.inference_mode():
                    wanted = reference(torch.cat([context, torch.tensor(path[::-1], dtype=torch.int64)])[None]).logits[0, -1]
                torch.testing.assert_close(logits[row], wanted, atol=TOLERANCE, rtol=0)
                row += 1


def test_a_tree_deeper_than_one_mask_word() -> None:
    """70 nodes: the bitmask needs a second word, and bit 63 is a sign bit."""
    context = torch.randint(3, VOCAB, (4,))
    parents = torch.arange(-1, 69)
    parents[69] = 40  # not a chain, so that the mask is used
    tree = DraftTree(
        token_ids=torch.randint(3, VOCAB, (1, 70)), parents=parents[None], num_nodes=torch.tensor([70]), draw=Draw.DETERMINISTIC
    )
    runner = make_runner(tiny_model(), max_context=128)
    kv = runner.make_slots(1, 128)
    runner.forward(span(context, 0, 3, 0), kv)
    step = round_input(tree, context[-1:], torch.tensor([3]), torch.tensor([0]))
    logits = runner.logits(runner.forward(step, kv).hidden)
    whole = torch.cat([context, tree.token_ids[0]])
    with torch.inference_mode():
        chained = tiny_model()(whole[None, :-1]).logits[0]
        branch = tiny_model()(torch.cat([whole[:45], whole[-1:]])[None]).logits[0, -1]
    torch.testing.assert_close(logits[:70], chained[3:], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logits[70], branch, atol=TOLERANCE, rtol=0)


def test_commit_moves_the_accepted_path_in_every_layer() -> None:
    runner = make_runner(tiny_model(), max_context=64)
    kv = runner.make_slots(2, 32)
    kv.k.copy_(torch.randn_like(kv.k))
    kv.v.copy_(torch.randn_like(kv.v))
    before = kv.k.clone(), kv.v.clone()
    plan = AttentionPlan(row_offsets=torch.tensor([0, 6, 12]), slots=torch.tensor([1, 0]), context_lengths=torch.tensor([5, 3]))
    runner.commit(kv, plan, torch.tensor([[1, 4], [0, 3]]), torch.tensor([[-1, 2, 5], [-1, -1, 4]]))
    for cache, old in zip((kv.k, kv.v), before, strict=True):
        wanted = old.clone()
        wanted[:, 1, :, 6] = old[:, 1, :, 7]
        wanted[:, 1, :, 7] = old[:, 1, :, 10]
        wanted[:, 0, :, 5] = old[:, 0, :, 7]
        assert torch.equal(cache, wanted)


def test_taps_are_the_layers_outputs() -> None:
    tokens = torch.randint(3, VOCAB, (9,))
    with torch.inference_mode():
        wanted = tiny_model()(tokens[None], output_hidden_states=True).hidden_states
    for runner in runners("llama", {}):
        step = StepInput(token_ids=tokens, positions=torch.arange(9), plan=span(tokens, 0, 9, 0).plan, tap_layers=(0, -1))
        out = runner.forward(step, runner.make_slots(1, 32))
        torch.testing.assert_close(out.taps[0], wanted[1][0], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(out.taps[-1], wanted[-1][0], atol=TOLERANCE, rtol=0)


def test_unknown_architectures_take_the_general_runner() -> None:
    model = tiny_model("llama", hidden_act="gelu")
    assert not is_fusable(model.config)
    assert isinstance(make_runner(model, max_context=64), TransformersRunner)
    with pytest.raises(ValueError, match="not one that FusedDecoder computes"):
        FusedDecoder(model, TorchOps(), 64)


def test_models_with_recurrent_layers_are_refused() -> None:
    model = tiny_model()
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        make_runner(model, max_context=64, fused=False)


def other_model(config: PreTrainedConfig) -> nn.Module:
    torch.manual_seed(11)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model


def test_any_model_on_the_attention_interface_runs() -> None:
    """Olmo2 normalises after its layers, Phi3 and StarCoder2 fuse or bias their projections: none is known to the fused runner."""
    for kind in (Olmo2Config, Phi3Config, Starcoder2Config):
        config = kind(**SIZES)
        tokens = torch.randint(3, VOCAB, (17,))
        with torch.inference_mode():
            wanted = other_model(config)(tokens[None]).logits[0]
        runner = make_runner(other_model(config), max_context=64)
        assert isinstance(runner, TransformersRunner)
        kv = runner.make_slots(1, 32)
        parts = [runner.logits(runner.forward(span(tokens, a, b, slot=0), kv).hidden) for a, b in ((0, 11), (11, 17))]
        torch.testing.assert_close(torch.cat(parts), wanted, atol=TOLERANCE, rtol=0)


def test_a_model_that_treats_its_logits_is_refused() -> None:
    """Granite divides its logits; leaving that out would sample from another law without any other sign."""
    with pytest.raises(ValueError, match="GraniteForCausalLM: the embedded engine's logits differ"):
        make_runner(other_model(GraniteConfig(**SIZES, logits_scaling=8.0)), max_context=64)
