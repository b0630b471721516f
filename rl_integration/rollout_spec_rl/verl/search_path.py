"""Makes the Hydra groups ``rollout_spec`` and ``machine`` visible to verl's entry points without --config-dir."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

CONFIGS = "pkg://rollout_spec_rl.verl.configs"


class RolloutSpecSearchPath(SearchPathPlugin):
    """Our folder comes last: a user's group of the same name wins."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="rollout_spec", path=CONFIGS)
