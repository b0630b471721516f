"""Refreshing a drafter while it serves: on states that rollouts leave behind, by steps of a trainer beside the engine."""
