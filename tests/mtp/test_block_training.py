"""The block drafter in training: which slots, what each sees, and that it learns.

Shape legend: T anchors, G slots, B block size, H hidden size.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from block_tiny import BLOCK, DRAFT_IDS, block_model, draft_batch, packed, tiny_policy
from torch import Tensor

from rollout_spec_mtp.block.config import BlockConfig, spread_layers
from rollout_spec_mtp.block.model import BlockModel
from rollout_spec_mtp.losses import FirstErrorFocal, LossConfig, PositionWeight, chunked_loss
from rollout_spec_mtp.training.protocol import PackedBatch, PolicyParts, SlotLayout

LENGTHS = [[(3, 6), (2, 9)], [(5, 4)]]
FUSIONS = ["shared", "per_layer"]


def naive_block(model: BlockModel, batch: PackedBatch, row: int, place: int) -> Tensor:
    """[G, H] of one anchor, one head and one query at a time, from the formulas (float64)."""
    config, weights = model.config, {name: value.detach().double() for name, value in model.named_parameters()}
    start = place - int(batch.positions[row, place])
    states = [batch.hidden[layer][row, start:place].double() for layer in config.target_layers]

    def norm(x: Tensor, name: str) -> Tensor:
        return weights[name + ".weight"] * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def rope(x: Tensor, position: int) -> Tensor:
        half = config.head_dim // 2
        angles = position * config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        return torch.cat([x[:half] * angles.cos() - x[half:] * angles.sin(), x[half:] * angles.cos() + x[:half] * angles.sin()])

    def project(data: Tensor, name: str, head: int) -> Tensor:
        return (data @ weights[name + ".weight"].T).view(len(data), -1, config.head_dim)[:, head]

    mask = weights["mask_embedding"] if config.mask == "learned" else model.policy.embedding[config.mask_token_id].double()
    x = torch.stack([model.policy.embedding[batch.token_ids[row, place]].double()] + [mask] * config.num_slots)
    group = config.num_heads // config.num_kv_heads
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        if config.fusion == "shared":
            context, prefix = norm(torch.cat(states, dim=1) @ weights["fc.weight"].T, "hidden_norm"), layer + "self_attn."
        else:
            mixed = sum(share * state for share, state in zip(weights[layer + "context_fusion.weights"].softmax(0), states, strict=True))
            assert isinstance(mixed, Tensor)
            context, prefix = norm(mixed, layer + "context_fusion.norm"), layer + "self_attn.context_"
        normed = norm(x, layer + "input_layernorm")
        out = torch.zeros(config.block_size, config.num_heads * config.head_dim, dtype=torch.float64)
        for head in range(config.num_heads):
            kv = head // group
            keys = [
                norm(k, layer + "self_attn.k_norm")
                for k in torch.cat([project(context, prefix + "k_proj", kv), project(normed, layer + "self_attn.k_proj", kv)])
            ]
            values = torch.cat([project(context, prefix + "v_proj", kv), project(normed, layer + "self_attn.v_proj", kv)])
            positions = [*range(place - start), *(place - start + i for i in range(config.block_size))]
            turned = torch.stack([rope(key, position) for key, position in zip(keys, positions, strict=True)])
            for i, query in enumerate(norm(project(normed, layer + "self_attn.q_proj", head), layer + "self_attn.q_norm")):
                scores = turned @ rope(query, place - start + i) / config.head_dim**0.5
                out[i, head * config.head_dim : (head + 1) * config.head_dim] = scores.softmax(0) @ values
        x = x + out @ weights[layer + "self_attn.o_proj.weight"].T
        normed = norm(x, layer + "post_attention_layernorm")
        gate = torch.nn.functional.silu(normed @ weights[layer + "mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ weights[layer + "mlp.up_proj.weight"].T)) @ weights[layer + "mlp.down_proj.weight"].T
    return norm(x, "norm")[1:]


def every_slot(batch: PackedBatch, num_slots: int) -> dict[int, list[bool]]:
    """Flat anchor -> validity of its slots, by a walk over the tokens."""
    found: dict[int, list[bool]] = {}
    length = batch.token_ids.shape[1]
    for row in range(batch.token_ids.shape[0]):
        for place in range(length):
            valid = []
            for step in range(1, num_slots + 1):
                inside = place + step < length and batch.sequence_ids[row, place] == batch.sequence_ids[row, place + step]
                valid.append(bool(inside and batch.is_response[row, place + step] and (not valid or valid[-1])))
            if valid[0] and batch.sequence_ids[row, place] >= 0:
                found[row * length + place] = valid
    return found


def test_layers_are_spread_as_in_the_published_checkpoints() -> None:
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(30, 5) == (1, 8, 14, 20, 27)
    assert spread_layers(30, 1) == (15,)
    with pytest.raises(ValueError, match="8 layers"):
        spread_layers(8, 6)


def test_layout_holds_every_slot_and_none_beyond_a_sequence() -> None:
    policy = tiny_policy()
    model = block_model(policy)
    batch = packed(policy, model, LENGTHS)
    layout = model.layout(batch, seed=3)
    wanted = every_slot(batch, BLOCK - 1)
    assert dict(zip(layout.anchors.tolist(), layout.valid.tolist(), strict=True)) == wanted
    assert len(wanted) == 6 + 9 + 4
    where = layout.valid
    assert torch.equal(layout.token_rows[where], (layout.anchors[:, None] + torch.arange(1, BLOCK))[where])
    assert torch.equal(layout.target_rows, layout.token_rows - 1)


def test_anchors_are_drawn_per_sequence_from_the_seed() -> None:
    policy = tiny_policy()
    model = block_model(policy, num_anchors=3)
    batch = packed(policy, model, LENGTHS)
    everything = set(every_slot(batch, BLOCK - 1))
    layouts = [model.layout(batch, seed) for seed in (1, 1, 2, 3, 4, 5, 6, 7, 8, 9)]
    assert torch.equal(layouts[0].anchors, layouts[1].anchors)
    assert any(not torch.equal(layouts[0].anchors, other.anchors) for other in layouts)
    length = batch.token_ids.shape[1]
    for layout in layouts:
        anchors = layout.anchors.tolist()
        assert anchors == sorted(set(anchors))
        assert set(anchors) <= everything
        sequences = [(anchor // length, int(batch.sequence_ids.flatten()[anchor])) for anchor in anchors]
        assert [sequences.count(sequence) for sequence in ((0, 0), (0, 1), (1, 0))] == [3, 3, 3]
    assert set().union(*(layout.anchors.tolist() for layout in layouts)) == everything
    assert set(model.eval().layout(batch, 1).anchors.tolist()) == everything


@pytest.mark.parametrize("mask", ["token", "learned"])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_forward_is_the_formula(fusion: str, mask: str) -> None:
    policy = tiny_policy()
    model = block_model(policy, fusion=fusion, mask=mask)
    batch = packed(policy, model, LENGTHS)
    layout = model.layout(batch, seed=0)
    hidden = model(batch, layout)
    length = batch.token_ids.shape[1]
    for index in (0, 4, 9, 18):
        anchor = int(layout.anchors[index])
        wanted = naive_block(model, batch, anchor // length, anchor % length)
        torch.testing.assert_close(hidden[index].double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_nothing_at_or_after_the_anchor_and_no_neighbour_reaches_a_block(fusion: str) -> None:
    policy = tiny_policy()
    model = block_model(policy, fusion=fusion)
    batch = packed(policy, model, LENGTHS)
    layout = model.layout(batch, seed=0)
    before = model(batch, layout)
    length = batch.token_ids.shape[1]
    for flat in range(batch.token_ids.numel()):
        row, place = divmod(flat, length)
        tokens = batch.token_ids.clone()
        tokens[row, place] = (tokens[row, place] + 1) % 50
        hidden = {layer: states.clone() for layer, states in batch.hidden.items()}
        for states in hidden.values():
            states[row, place] += 1.0
        changed = (model(dataclasses.replace(batch, token_ids=tokens, hidden=hidden), layout) - before).abs().amax((1, 2)) > 1e-6
        # A token reaches its own block, a state the later blocks of its sequence; nothing else.
        same = (layout.anchors // length == row) & (batch.sequence_ids.flatten()[layout.anchors] == batch.sequence_ids[row, place])
        reached = same & (layout.anchors >= flat) if batch.sequence_ids[row, place] >= 0 else torch.zeros_like(same)
        assert torch.equal(changed, reached), (row, place)


def test_spans_do_not_change_the_result() -> None:
    policy = tiny_policy()
    whole, pieces = block_model(policy, attention_rows=4096), block_model(policy, attention_rows=1)
    batch = packed(policy, whole, LENGTHS)
    layout = whole.layout(batch, seed=0)
    torch.testing.assert_close(whole(batch, layout), pieces(batch, layout), atol=1e-5, rtol=1e-5)


def test_a_batch_without_responses_has_no_anchor() -> None:
    policy = tiny_policy()
    model = block_model(policy)
    batch = packed(policy, model, [[(4, 0)]])
    layout = model.layout(batch, seed=0)
    assert layout.valid.shape == (0, BLOCK - 1)
    assert model(batch, layout).shape == (0, BLOCK - 1, 32)


@pytest.mark.parametrize("ids", [None, DRAFT_IDS], ids=["whole", "reduced"])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_few_steps_lower_the_loss_and_leave_the_policy_alone(fusion: str, ids: Tensor | None) -> None:
    policy = tiny_policy()
    parts = PolicyParts.of(policy)
    torch.manual_seed(0)
    values = {"mask_token_id": 60, "block_size": BLOCK, "num_layers": 1, "target_layers": 3, "fusion": fusion, "mask": "learned"}
    model = BlockModel(BlockConfig.from_mapping(values, parts), parts, ids)
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    assert not {id(parameter) for parameter in model.parameters()} & {id(parameter) for parameter in policy.parameters()}
    config = LossConfig(kl=1.0, chain=0.1, first_error_focal=FirstErrorFocal(weight=0.1), position_weight=PositionWeight())
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = packed(policy, model, LENGTHS)
    losses = []
    for _ in range(12):
        loss = chunked_loss(draft_batch(model, batch, model.layout(batch, seed=0)), config).loss
        loss.backward()
        assert all(parameter.grad is not None and bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses
    assert all(parameter.grad is None and torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_sise": 4}, "unknown key 'block_sise'"),
        ({"block_size": 1}, "block_size must be from 2"),
        ({"target_layers": [1, 9]}, "distinct layers of the policy's 8"),
        ({"target_layers": [1, 1]}, "distinct layers"),
        ({"fusion": "per_layer", "target_layers": [3]}, "two or more"),
        ({"fusion": "both"}, "fusion must be one of shared, per_layer"),
        ({"mask_token_id": 61}, "outside the vocabulary of 61"),
        ({"hidden_size": 64}, "hidden_size 64 does not fit the policy's 32"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockConfig.from_mapping({"mask_token_id": 60, "target_layers": 3, **changes}, PolicyParts.of(tiny_policy()))


def test_the_mapping_makes_the_same_model_again() -> None:
    policy = tiny_policy()
    with pytest.raises(ValueError, match="mask_token_id is missing"):
        BlockConfig.from_mapping({"target_layers": 3}, PolicyParts.of(policy))
    model = block_model(policy, fusion="per_layer", mask="learned")
    again = BlockConfig.from_mapping(model.config_mapping(), PolicyParts.of(policy))
    assert again == model.config
    layout = SlotLayout(
        anchors=torch.tensor([4]),
        token_rows=torch.tensor([[5, 6, 7, 8]]),
        target_rows=torch.tensor([[4, 5, 6, 7]]),
        valid=torch.ones(1, 4, dtype=torch.bool),
    )
    batch = packed(policy, model, LENGTHS)
    other = BlockModel(again, PolicyParts.of(policy))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(batch, layout), other(batch, layout))
