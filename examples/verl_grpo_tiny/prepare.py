"""Makes what the run needs, from nothing: a random Llama of 0.1 M parameters, a byte tokenizer, and sums as prompts.

python prepare.py FOLDER [HEAD_DIM]
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> int:
    """One token a byte and three special ones; returns how many there are."""
    vocabulary = {token: place for place, token in enumerate((*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>", chat_template=CHAT)
    tokenizer.save_pretrained(folder)
    return len(vocabulary)


def write_model(folder: Path, head_dim: int = 16) -> None:
    """vLLM's attention on a CPU wants heads of 32 at least."""
    config = LlamaConfig(
        vocab_size=write_tokenizer(folder),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.3,  # peaked enough that something repeats, so that there is something to draft
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_prompts(path: Path, pairs: list[tuple[int, int]]) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index},
        }
        for index, (a, b) in enumerate(pairs)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", *map(int, sys.argv[2:]))
    pairs = [(a, b) for a in range(10) for b in range(10)]
    write_prompts(folder / "train.parquet", pairs)
    write_prompts(folder / "validation.parquet", pairs[:4])


if __name__ == "__main__":
    main()
