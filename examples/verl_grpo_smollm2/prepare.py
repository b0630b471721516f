"""SmolLM2-135M-Instruct as a folder, and grade-school problems of reasoning-gym in verl's format.

python prepare.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from rollout_spec.engine.models import resolve_model
from rollout_spec.prompts import load_prompts


def write_prompts(path: Path, spec: str, model: Path) -> None:
    rows = [
        {
            "data_source": "gsm_symbolic",
            "prompt": [dict(message) for message in prompt.messages or ()],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": prompt.answer},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(load_prompts(spec, AutoTokenizer.from_pretrained(model)))
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    model = resolve_model("smollm2-135m", report=print)
    write_prompts(folder / "train.parquet", "gsm_symbolic:512", model)
    write_prompts(folder / "validation.parquet", "gsm_symbolic:16@5000", model)
    link = folder / "model"
    if not link.exists():
        link.symlink_to(model)


if __name__ == "__main__":
    main()
