"""Called by vLLM in every process (entry-point group ``vllm.general_plugins``): mends what its CPU path gets wrong with speculation."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """On a CPU apply the fixes; an untested vLLM is left alone, and refused when our proposer is asked for."""
    from vllm.platforms import current_platform

    from rollout_spec_rl.vllm import patches

    if not current_platform.is_cpu():
        return
    try:
        patches.check_version()
    except ValueError as error:
        logger.warning("rollout_spec mends nothing in this vLLM: %s", error)
        return
    for patch in patches.ON_CPU:
        patch.apply()
