"""RolloutSpecReplica: what verl's trainer holds of one embedded engine. It starts the server's process and passes verl's calls on."""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutReplica

from rollout_spec_rl.verl.names import server_name
from rollout_spec_rl.verl.options import RolloutPlan, plan_rollouts
from rollout_spec_rl.verl.recovery import MAX_RESTARTS
from rollout_spec_rl.verl.server import RolloutServer


class RolloutSpecReplica(RolloutReplica):
    """One engine, one process: no tensor parallelism, so a replica is one worker of verl's."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, gpus_per_node: int = 8, **further: Any) -> None:
        super().__init__(replica_rank, config, model_config, gpus_per_node, **further)
        self._plan: RolloutPlan = plan_rollouts(as_mapping(self.config))

    async def launch_servers(self) -> None:
        """Start the server beside its worker and wait for its engine."""
        (worker,) = self.workers
        node_id = await worker.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        model: HFModelConfig = omega_conf_to_dataclass(self.model_config, dataclass_type=HFModelConfig)
        # The engine runs on the CPU: it takes no accelerator, and on a machine with one it must not see it.
        environment = dict.fromkeys(get_platform().ray_noset_envvars(), "1")
        environment[get_platform().visible_devices_envvar()] = ""
        name = server_name(self.replica_rank, self.name_suffix)
        server = (
            ray.remote(RolloutServer)
            .options(
                name=name,
                max_concurrency=self.max_concurrency,
                num_cpus=0,
                # A process that dies is replaced, and every call that it owed an answer is made again.
                max_restarts=MAX_RESTARTS,
                max_task_retries=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                runtime_env={"env_vars": environment},
            )
            .remote(self._plan, model.local_path, self.replica_rank)
        )
        await server.ready.remote()
        self.servers.append(server)
        self._server_handle = server
        self._server_address = name


def as_mapping(config: Any) -> dict[str, Any]:
    """verl's rollout config, a mapping in all its forms, with our own part as plain containers."""
    plain = {name: config[name] for name in config}
    custom = plain.get("custom")
    plain["custom"] = OmegaConf.to_container(custom, resolve=True) if OmegaConf.is_config(custom) else custom
    return plain
