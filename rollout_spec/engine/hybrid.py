"""HybridRunner: models that mix full attention with Gated Delta Net layers (Qwen3-Next, Qwen3.5), verified without rollback.

A recurrent layer's state is not advanced by drafts: every node's output follows from the state before the root and from its ancestors
(gated_delta), and the commit writes the state after the accepted node only. The modules are run one by one, as transformers' decoder layer
does; attention takes the way of TransformersRunner.

Shape legend: R rows, B requests, N rows of a request (padded), H value heads, Hk key heads, dk key size, dv value size, C channels of the
short convolution, D depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.module_runner import ModuleRunner
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.recurrent import LayerRows, Memory, RecurrentShape, RecurrentSlots
from rollout_spec.engine.runner import CausalLM, StepInput, StepOutput
from rollout_spec.engine.transformers_runner import ATTENTION_NAME

HYBRID_MODEL_TYPES = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})

_BLOCK = 64  # rows of known tokens solved at once: a block costs the square of its rows, and a state between two blocks


def is_hybrid(config: object) -> bool:
    """True if HybridRunner computes this architecture."""
    return getattr(config, "model_type", "") in HYBRID_MODEL_TYPES


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Where the rows of a forward stand among their requests'."""

    slots: Tensor  # [B]
    context_lengths: Tensor  # [B]
    counts: Tensor  # [B] rows of each request
    parents: Tensor  # [B, N] row each row follows on, -1 = the context
    present: Tensor  # [B, N] bool: not padding
    is_known: bool

    def padded(self, flat: Tensor) -> Tensor:
        """[B, N, ...] of [R, ...]; zeros where there is no row."""
        out = flat.new_zeros(*self.present.shape, *flat.shape[1:])
        out[self.present] = flat
        return out

    def blocks(self) -> list[slice]:
        """Drafts are one tree; known tokens are a line that may be cut."""
        num_rows, step = self.parents.shape[1], _BLOCK if self.is_known else max(self.parents.shape[1], 1)
        return [slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]


def _rows_of(step: StepInput, device: torch.device) -> _Rows:
    plan, counts = step.plan, step.plan.rows_per_request
    present = torch.arange(int(counts.max())) < counts[:, None]
    parents = torch.full(present.shape, -1)
    parents[present] = plan.row_parents()
    return _Rows(
        slots=plan.slots,
        context_lengths=plan.context_lengths,
        counts=counts,
        parents=parents.to(device),
        present=present.to(device),
        is_known=step.is_known,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Projected:
    """What a Gated Delta Net layer makes of its rows before they mix; [R, ...], or [B, N, ...] once padded."""

    mixed: Tensor  # [R, C] queries, keys and values: what the convolution sees
    gate: Tensor  # [R, H, dv] of the output
    log_decay: Tensor  # [R, H] float32
    beta: Tensor  # [R, H] float32


class HybridRunner(ModuleRunner):
    """Runs the module's layers with our attention and our recurrence."""

    def __init__(self, model: CausalLM, ops: Ops) -> None:
        config = model.config
        if not is_hybrid(config):
            raise ValueError(f"model type {config.model_type!r} is not one that HybridRunner computes")
        super().__init__(model, ops)
        self._layer_types: Sequence[str] = config.layer_types
        key_channels = config.linear_num_key_heads * config.linear_key_head_dim
        self._shape = RecurrentShape(
            num_heads=config.linear_num_value_heads,
            key_size=config.linear_key_head_dim,
            value_size=config.linear_value_head_dim,
            num_channels=2 * key_channels + config.linear_num_value_heads * config.linear_value_head_dim,
            window=config.linear_conv_kernel_dim,
        )
        model.set_attn_implementation(ATTENTION_NAME)

    def make_slots(self, num_slots: int, capacity: int) -> RecurrentSlots:
        return RecurrentSlots(
            layer_types=self._layer_types,
            shape=self._shape,
            num_slots=num_slots,
            num_kv_heads=self._num_kv_heads,
            capacity=capacity,
            head_dim=self._head_dim,
            dtype=self.dtype,
            device=self._model.device,
        )

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: KVSlots) -> StepOutput:
        assert isinstance(kv, RecurrentSlots)
        body, rows = self._model.model, _rows_of(step, self._model.device)
        hidden = body.embed_tokens(step.token_ids.to(self._model.device))[None]  # [1, R, hidden]
        rotary = body.rotary_emb(hidden, step.positions[None].to(self._model.device))
        taps: dict[int, Tensor] = {}
        for index, (layer, kind) in enumerate(zip(body.layers, self._layer_types, strict=True)):
            normed = layer.input_layernorm(hidden)
            if kind == "full_attention":
                plan = {"rollout_ops": self.ops, "rollout_kv": kv, "rollout_plan": step.plan}
                mixed, _ = layer.self_attn(hidden_states=normed, position_embeddings=rotary, attention_mask=None, **plan)
            else:
                mixed = self._recur(layer.linear_attn, normed, index, kv, rows)
            hidden = hidden + mixed
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            if index in step.tap_layers:
                taps[index] = hidden[0]
        if step.is_known:
            kv.advance(rows.slots, rows.context_lengths + rows.counts, known=True)
        out = body.norm(hidden)[0]
        return StepOutput(hidden=out, taps=taps | ({-1: out} if -1 in step.tap_layers else {}))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.lm_head(hidden)
        return logits

    @torch.inference_mode()
    def commit(self, kv: KVSlots, plan: AttentionPlan, paths: Tensor, moves: Tensor | None) -> None:
        """K/V as everywhere; of the recurrent layers, the memory after the last accepted node (or the root) of each request."""
        super().commit(kv, plan, paths, moves)
        assert isinstance(kv, RecurrentSlots)
        # A path ascends and is padded with -1; row 0 is the root.
        leaves = paths.amax(1) + 1 if paths.shape[1] else torch.zeros_like(plan.slots)
        for layer, rows in kv.rows.items():
            memory = rows.after(leaves.to(self._model.device), self.ops.gated_delta)
            kv.remember(layer, plan.slots, memory, known=False)
        kv.rows.clear()
        kv.advance(plan.slots, plan.context_lengths + 1 + (paths >= 0).sum(1), known=False)

    def _recur(self, net: CausalLM, x: Tensor, layer: int, kv: RecurrentSlots, rows: _Rows) -> Tensor:
        """[1, R, hidden] of a Gated Delta Net layer; x [1, R, hidden]."""
        flat = _projected(net, x[0])
        given = _Projected(**{name: rows.padded(of) for name, of in vars(flat).items()})
        memory, parts = kv.memory(layer, rows.slots, rows.context_lengths), list[Tensor]()
        for block in rows.blocks():
            # A block of a line goes on from the memory after the block before it.
            parents = rows.parents[:, block] - block.start if rows.is_known else rows.parents
            found = self._solve(net, given, block, parents.clamp_min(-1), memory)
            parts.append(found.states.out)
            if rows.is_known:
                last = (rows.counts - block.start).clamp_max(block.stop - block.start) - 1
                memory = found.after(last.clamp_min(-1).to(x.device), self.ops.gated_delta)
            else:
                kv.rows[layer] = found
        if rows.is_known:
            kv.remember(layer, rows.slots, memory, known=True)
        out = torch.cat(parts, dim=1)[rows.present].to(x.dtype)  # [R, H, dv]
        out = net.norm(out.flatten(0, 1), flat.gate.flatten(0, 1)).view(1, x.shape[1], -1)
        result: Tensor = net.out_proj(out)
        return result

    def _solve(self, net: CausalLM, given: _Projected, block: slice, parents: Tensor, memory: Memory) -> LayerRows:
        """Convolution and recurrence of some rows behind a memory, as the module computes them, along parents [B, n]."""
        shape, inputs = self._shape, given.mixed[:, block]
        convolved = F.silu(self.ops.gated_delta.tree_convolution(inputs, memory.history, net.conv1d.weight.squeeze(1), parents))
        key_channels = (shape.num_channels - shape.num_heads * shape.value_size) // 2
        q, k, v = convolved.split([key_channels, key_channels, shape.num_heads * shape.value_size], dim=-1)
        queries, keys = (_repeated(_normalised(of.unflatten(-1, (-1, shape.key_size))), shape.num_heads).float() for of in (q, k))
        states = self.ops.gated_delta.tree_delta(
            queries * shape.key_size**-0.5,
            keys,
            v.unflatten(-1, (shape.num_heads, shape.value_size)).float(),
            given.log_decay[:, block],
            given.beta[:, block],
            parents,
            memory.state,
        )
        return LayerRows(before=memory, inputs=inputs, keys=keys, states=states, parents=parents)


def _projected(net: CausalLM, x: Tensor) -> _Projected:
    """x [R, hidden]. Qwen3-Next interleaves the projections by key head, Qwen3.5 does not."""
    if hasattr(net, "in_proj_qkvz"):
        q, k, v, gate, b, a = (of[0] for of in net.fix_query_key_value_ordering(net.in_proj_qkvz(x[None]), net.in_proj_ba(x[None])))
        mixed = torch.cat([of.flatten(1) for of in (q, k, v)], dim=-1)
    else:
        mixed, gate, b, a = net.in_proj_qkv(x), net.in_proj_z(x).unflatten(-1, (-1, net.head_v_dim)), net.in_proj_b(x), net.in_proj_a(x)
    decay = -net.A_log.float().exp() * F.softplus(a.float() + net.dt_bias)
    return _Projected(mixed=mixed, gate=gate, log_decay=decay, beta=b.sigmoid().float())


def _normalised(x: Tensor) -> Tensor:
    """x over its Euclidean norm, along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    """[B, N, H, dk] of [B, N, Hk, dk]: neighbouring value heads share a key head."""
    return x.repeat_interleave(num_heads // x.shape[2], dim=2)
