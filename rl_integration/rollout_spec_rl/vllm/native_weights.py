"""Weights of vLLM's own drafters: loaded by its layerwise reload, with what that leaves behind put right.

Shape legend: L layers, H hidden size, G rows of the key and value projections of one layer, D size of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_spec.engine.weights import checked, checksums
from rollout_spec_rl.vllm.checkpoint_files import NamedTensor, checkpoint_names, read_tensors
from rollout_spec_rl.vllm.layerwise import load_into

_ENDS = {"embed_tokens": "embed_tokens.", "lm_head": "lm_head."}  # modules that may be the target's -> how their tensors are named


def reload(runner: Any, tensors: Iterable[NamedTensor]) -> dict[str, int]:
    """All weights of the drafter's checkpoint, by its names; returns their checksums.

    ValueError names what is unknown, missing, misshapen or not finite, and nothing is changed then. RuntimeError if the target changed.
    """
    config, model = runner.vllm_config, runner.drafter.model
    spec = config.speculative_config
    names = _names(spec, config.model_config)
    given = ((name, tensor) for name, tensor in tensors if name not in names.of_policy)
    taken = dict(checked(given, names.own, names.aliases, partial=False))
    fused = _fused(model, taken)
    # A module that is the target's keeps the target's weights, whatever the drafter's checkpoint has of its own there.
    skipped = tuple(name for module, name in _ENDS.items() if _shared(runner.get_model(), model, module))
    with _target_stays(runner.get_model(), model):
        kept = ((name, tensor) for name, tensor in taken.items() if not any(part in name for part in skipped))
        load_into(model, kept, config, spec.draft_model_config)
    if fused:
        # Its other buffers come from the layers, which are whole again.
        model.model._build_fused_kv_buffers()  # noqa: SLF001  # vLLM offers no other way
        for name, tensor in fused.items():
            setattr(model.model, name, tensor)
    return checksums(taken)


def on_disk(spec: Any, target_config: Any) -> dict[str, int]:
    """Checksums of the checkpoint that vLLM loaded the drafter from; empty if it is no folder of safetensors."""
    place = Path(spec.draft_model_config.model)
    if not place.is_dir() or not any(place.glob("*.safetensors")):
        return {}
    own = _names(spec, target_config).own
    return checksums({name: tensor for name, tensor in read_tensors(place) if name in own})


@dataclass(frozen=True, kw_only=True)
class _Names:
    """Of a checkpoint that holds a drafter."""

    own: Mapping[str, Tensor]  # the drafter's, with their shapes
    aliases: Mapping[str, str]  # names of tied tensors -> own ones
    of_policy: frozenset[str]  # the policy's, where the drafter is a head in its checkpoint


def _names(spec: Any, target_config: Any) -> _Names:
    """A head in the policy's checkpoint is told by its prefixes (rollout_spec_mtp.mtp.published has the layouts)."""
    drafter = spec.draft_model_config
    tied = spec.method == "draft_model" and bool(drafter.hf_config.tie_word_embeddings)
    own, aliases = checkpoint_names(Path(drafter.model), tied=tied)
    if drafter.model != target_config.model or spec.method != "mtp":
        return _Names(own=own, aliases=aliases, of_policy=frozenset())
    layers = target_config.hf_text_config.num_hidden_layers
    prefixes = ("mtp.", "model.mtp_layers.", f"model.layers.{layers}.")
    head = {name: shape for name, shape in own.items() if name.startswith(prefixes)}
    return _Names(own=head, aliases={}, of_policy=frozenset(own) - frozenset(head))


def _shared(target: Any, model: Any, name: str) -> bool:
    of_target = {id(module) for path, module in target.named_modules() if path.rpartition(".")[2] == name}
    return any(id(module) in of_target for path, module in model.named_modules() if path.rpartition(".")[2] == name)


@contextmanager
def _target_stays(target: Any, model: Any) -> Iterator[None]:
    """Around a change of the drafter: tensors that it shares with the target must stay. RuntimeError names those that did not."""
    ids = {id(tensor) for tensor in model.parameters()}
    shared = {name: tensor for name, tensor in target.named_parameters() if id(tensor) in ids and tensor.numel()}
    before = checksums(shared)
    yield
    after = checksums({name: tensor for name, tensor in target.named_parameters() if name in before})
    changed = [name for name, value in before.items() if after.get(name) != value]
    if changed:
        raise RuntimeError(f"the drafter's weights changed the policy's own {', '.join(changed[:8])}")


def _fused(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What DFlash keeps beside its layers, from new weights: the key and value projections of all layers in one matrix, and their norms.

    vLLM fuses them at loading from the layers' weights [L * G, H], [L, D]; in a reload these are packed, or not there yet, when it does.
    Empty for drafters without. ValueError for a drafter whose projections are not plain, or a tensor that is missing for it.
    """
    kept = vars(model.model)
    if "_fused_kv_weight" not in kept:
        return {}
    fused: Tensor | None = kept["_fused_kv_weight"]
    if fused is None or kept["_fused_kv_bias"] is not None:
        raise ValueError("new weights of a quantised DFlash drafter, or of one with biases, cannot be loaded: start the engine anew")
    layers = [f"layers.{layer}.self_attn" for layer in range(len(model.model.layers))]
    wanted = [f"{layer}.{name}.weight" for layer in layers for name in ("k_proj", "v_proj", "k_norm")] + ["hidden_norm.weight"]
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise ValueError(f"weights refused, nothing was changed: DFlash's keys and values are made from {missing[0]}, which is not there")
    parts = [tensors[f"{layer}.{name}.weight"] for layer in layers for name in ("k_proj", "v_proj")]
    norms = [tensors[f"{layer}.k_norm.weight"] for layer in layers]
    return {
        "_fused_kv_weight": torch.cat(parts).to(fused),
        "_k_norm_weights": torch.stack(norms).to(kept["_k_norm_weights"]),
        "_hidden_norm_weight": tensors["hidden_norm.weight"].to(kept["_hidden_norm_weight"]),
    }
