"""The command under DeepSpeed's ZeRO, over two CPU processes: the same losses as one process without it.

DeepSpeed is no dependency of the test environment: pip install deepspeed, then pytest -m slow tests/mtp/test_deepspeed.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mtp_tiny import save_policy

from rollout_spec.sinks import read_events

pytestmark = pytest.mark.slow
REPO = Path(__file__).parents[2]

# accelerate 1.15 gives DeepSpeed processes a backend only where there is an accelerator; on CPUs each would be a world of its own.
_LAUNCHED = """
import accelerate.state as state
from accelerate.utils import DistributedType

state.PartialState._prepare_backend = lambda self, *_, **__: ("gloo", DistributedType.MULTI_CPU)
from rollout_spec_rl.compose import main

main()
"""


def _losses(out: Path) -> list[float]:
    return [event.loss for event in read_events(out / "train.jsonl")]


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_trains_as_one_process_does(tmp_path: Path, stage: int) -> None:
    pytest.importorskip("deepspeed")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{3 + i} w{5 + i} w7"}}\n' for i in range(40)))
    settings = {
        "model": str(save_policy(tmp_path / "model")),
        "out": "unused",
        "collect": {"prompts": str(prompts), "max_new_tokens": 24, "max_batch": 4, "storage": "float32"},
        "drafter": {"settings": {"draft_length": 3}},
        "train": {"epochs": 4, "rows_per_step": 4, "micro_rows": 4, "row_tokens": 64, "lr": 5e-3, "warmup_steps": 3},
        "evaluate": {"held_out": 0.2, "every_steps": 10},
    }
    config, launched = tmp_path / "config.yaml", tmp_path / "launched.py"
    config.write_text(yaml.safe_dump(settings))
    launched.write_text(_LAUNCHED)
    command = ["train-drafter", "--config", str(config), "--out"]
    one, two = tmp_path / "one", tmp_path / "two"
    subprocess.run([sys.executable, "-m", "rollout_spec_rl.compose", *command, str(one)], check=True, cwd=REPO)
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": f"configs/deepspeed/zero{stage}.json",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*torchrun, str(launched), *command, str(two), "--set", "train.micro_rows=2"], check=True, cwd=REPO, env=environ)
    assert len(_losses(one)) > 5
    assert _losses(two) == pytest.approx(_losses(one), rel=1e-3)
    lengths = [json.loads((out / "evaluation.json").read_text())["held_out"]["held_out_block_length_estimate"] for out in (one, two)]
    assert lengths[1] == pytest.approx(lengths[0], rel=1e-2)
