"""Rollouts without a model: a world with a known law of acceptance and a known cost of rounds, run through any budget controller.

For designing controllers, for tests, and for planning on hardware that one does not have.
"""
