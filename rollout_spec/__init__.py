"""Exactly lossless speculative decoding for reinforcement-learning rollouts."""

__version__ = "0.1.0"
