"""How the servers of a run are found: they are named actors of Ray, one name a replica."""

from __future__ import annotations

import ray

SERVER_PREFIX = "rollout_spec_server_"
VLLM_PREFIX = "vllm_server_"  # verl's own name, by which its workers look for it


def server_name(replica_rank: int, suffix: str = "") -> str:
    """The name by which the training worker finds its replica's server."""
    return f"{SERVER_PREFIX}{replica_rank}{suffix}"


def server_names() -> list[str]:
    """Of all servers of this run that are alive or being started again; vLLM's may run without us."""
    return sorted(name for name in ray.util.list_named_actors() if name.startswith((SERVER_PREFIX, VLLM_PREFIX)))
