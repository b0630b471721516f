"""Collecting rollouts and training drafters on them."""
