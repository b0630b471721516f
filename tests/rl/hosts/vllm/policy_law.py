"""The exact law of what the tiny policy samples, and how samples are held against it.

Shape legend: P prefixes, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from tiny_vllm import PROMPT
from torch import Tensor

from rollout_spec.sampling import SamplingParams, process_logits

LENGTH, COUNT = 5, 1500  # tokens of a sample, samples
LEAST_P = 1e-4
LAWS: dict[str, dict[str, Any]] = {"T1": {"temperature": 1.0}, "T.7 k20": {"temperature": 0.7, "top_k": 20}, "p.9": {"top_p": 0.9}}
REST = -1  # stands for all continuations of a prefix that is too rare to be looked at one by one


def processor(**params: Any) -> Callable[[Tensor], Tensor]:
    own = SamplingParams(**params)
    return lambda logits: process_logits(logits, [own] * logits.shape[0])


def laws_of(model: Any) -> dict[str, dict[tuple[int, ...], float]]:
    """By the names of ``LAWS``."""
    return {name: exact_law(model, processor(**params), LENGTH) for name, params in LAWS.items()}


@torch.inference_mode()
def greedy(model: Any, length: int) -> tuple[int, ...]:
    tokens = list(PROMPT)
    for _ in range(length):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(PROMPT) :])


@torch.inference_mode()
def exact_law(model: Any, process: Callable[[Tensor], Tensor], length: int, prompt: Sequence[int] = PROMPT) -> dict[tuple[int, ...], float]:
    """Probabilities of all continuations, those of rare prefixes summed up under (*prefix, REST).

    process: logits [P, V] -> logits whose softmax is sampled from.
    """
    law, prefixes = dict[tuple[int, ...], float](), {(): 1.0}
    for _ in range(length):
        names = list(prefixes)
        ids = torch.tensor([[*prompt, *name] for name in names])
        probs = torch.cat([process(model(part).logits[:, -1].float()).softmax(-1) for part in ids.split(256)])
        following: dict[tuple[int, ...], float] = {}
        for name, row in zip(names, probs.double().tolist(), strict=True):
            following |= {(*name, token): prefixes[name] * prob for token, prob in enumerate(row) if prob > 0}
        rare = {name: prob for name, prob in following.items() if prob < 1e-3}
        law |= {(*name, REST): prob for name, prob in rare.items()}
        prefixes = {name: prob for name, prob in following.items() if name not in rare}
    return law | prefixes


def fit(samples: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """p of a chi-square test of the samples against the law; cells are merged, by the law alone, until each expects five samples."""
    counts = dict.fromkeys(law, 0)
    for tokens in samples:
        name = next(key for key in _names(tokens) if key in counts)
        counts[name] += 1
    ordered = sorted(law, key=lambda name: (-law[name], name))
    seen = np.array([counts[name] for name in ordered], dtype=float)
    expected = np.array([law[name] for name in ordered]) * len(samples)
    edges, total = [0], 0.0
    for place, value in enumerate(expected):
        total += value
        if total >= 5:
            edges.append(place + 1)
            total = 0.0
    edges[-1] = len(expected)
    sums = [np.add.reduceat(values, edges[:-1]) for values in (seen, expected)]
    return float(stats.chisquare(sums[0], sums[1] * sums[0].sum() / sums[1].sum()).pvalue)


def _names(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tokens, *((*tokens[:end], REST) for end in range(1, len(tokens) + 1))]
