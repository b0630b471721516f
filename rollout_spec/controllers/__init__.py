"""Budget controllers that follow the batch size, the entropy, or expected tokens a second (``FixedBudget`` stands beside the protocol)."""

from rollout_spec.controllers.entropy import EntropyBudget
from rollout_spec.controllers.table import BatchTableBudget
from rollout_spec.controllers.throughput import ThroughputBudget

__all__ = ["BatchTableBudget", "EntropyBudget", "ThroughputBudget"]
