"""Sampling parameters of rows that lose tokens, each in another way, and of one that does not."""

from __future__ import annotations

from rollout_spec.sampling import SamplingParams

TRUNCATED = [
    SamplingParams(top_k=5),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, min_p=0.02),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01),
    SamplingParams(top_k=900, top_p=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=1, top_p=1e-6),
    SamplingParams(top_p=0.98),
]
