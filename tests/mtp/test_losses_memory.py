"""Full logits never exist: peak memory with a real vocabulary, measured in a process of its own, and the full size by arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from rollout_spec_mtp.losses.chunked import DEFAULT_CHUNK_BYTES, LIVE_LOGITS, DraftBatch

VOCAB, SLOTS, ANCHORS = 151_936, 4, 64
CHUNK_BYTES = 320 << 20

# Prints by how many bytes a training step raises the resident peak. One small step goes first: libraries allocate on first use.
# The objectives need every statistic that losses can ask for, and no target row is shared: the worst case.
MEASURE = """
import re, sys
import torch
from rollout_spec_mtp.losses import DraftBatch, LossConfig, chunked_loss
torch.set_num_threads(1)
vocab, slots, num_anchors, chunk_bytes = map(int, sys.argv[1:])
head = torch.randn(vocab, 16)
def step(anchors):
    batch = DraftBatch(
        student_hidden=torch.randn(anchors, slots, 16, requires_grad=True),
        target_hidden=torch.randn(anchors * slots, 16),
        target_rows=torch.arange(anchors * slots).reshape(anchors, slots),
        token_ids=torch.randint(vocab, (anchors, slots)),
        valid=torch.ones(anchors, slots, dtype=torch.bool),
        student_head=head,
        target_head=head,
    )
    chunked_loss(batch, LossConfig(hybrid=1.0, block_length=1.0), chunk_bytes=chunk_bytes).loss.backward()
def peak():
    # getrusage would give the larger of this and the peak of the process that started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
step(1)
before = peak()
step(num_anchors)
print(peak() - before)
"""


def test_peak_stays_within_the_chunk_limit() -> None:
    """The limit is about the size of all logits of teacher and student; eager code holds each several times over."""
    arguments = [str(number) for number in (VOCAB, SLOTS, ANCHORS, CHUNK_BYTES)]
    # glibc gives large blocks back at once only above its mmap threshold, which grows by itself unless it is set.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True, env=environment)
    peak = int(done.stdout)
    assert CHUNK_BYTES / 4 < peak <= CHUNK_BYTES
    assert peak < 1.1 * (2 * ANCHORS * SLOTS * VOCAB * 4)


def test_the_full_size_fits_into_four_gibibytes() -> None:
    """8192 tokens, gamma 4, vocabulary of 152k, hidden size 4096, float32: what the previous test bounds, plus the hidden states."""
    tokens, hidden_size = 8192, 4096
    student_hidden = tokens * SLOTS * hidden_size * 4
    target_hidden = (tokens + SLOTS) * hidden_size * 4
    kept_gradient, returned_gradient = student_hidden, student_hidden
    assert DEFAULT_CHUNK_BYTES + student_hidden + target_hidden + kept_gradient + returned_gradient < 4 << 30
    meta = DraftBatch(
        student_hidden=torch.empty(tokens, SLOTS, hidden_size, device="meta"),
        target_hidden=torch.empty(tokens + SLOTS, hidden_size, device="meta"),
        target_rows=torch.empty(tokens, SLOTS, dtype=torch.int64, device="meta"),
        token_ids=torch.empty(tokens, SLOTS, dtype=torch.int64, device="meta"),
        valid=torch.empty(tokens, SLOTS, dtype=torch.bool, device="meta"),
        student_head=torch.empty(VOCAB, hidden_size, device="meta"),
        target_head=torch.empty(VOCAB, hidden_size, device="meta"),
    )
    rows = meta.max_rows(DEFAULT_CHUNK_BYTES)
    assert LIVE_LOGITS * rows * VOCAB * 4 <= DEFAULT_CHUNK_BYTES
    assert rows >= 128  # enough rows for a product with the head to be worth its weights' traffic
