"""verl's weight syncs in a vLLM worker of ours: verl's own sender, its buckets, and a policy whose output head is its embedding."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vllm import PROMPT, load, sample, totals_of, write_policy
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("default")  # verl and Ray warn of their own parts

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Named = list[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def tied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("tied") / "model", seed=3, tied=True)


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], tied_policy: Path) -> Iterator[Any]:
    """An engine as verl makes it, but in this process."""
    from verl.workers.rollout.vllm_rollout import utils
    from vllm.v1.worker.cpu_worker import CPUWorker

    from rollout_spec_rl.patching import place
    from rollout_spec_rl.vllm.extension import RolloutSpecExtension
    from rollout_spec_rl.vllm.patches import UNDER_VERL_ON_CPU

    # vLLM makes an extension a base of its worker's class and knows of one a process; other tests have theirs.
    held = CPUWorker.__bases__
    with pytest.MonkeyPatch.context() as patch, ExitStack() as after:
        after.callback(setattr, CPUWorker, "__bases__", held)
        CPUWorker.__bases__ = tuple(base for base in held if not issubclass(base, RolloutSpecExtension))
        for change in UNDER_VERL_ON_CPU:
            owner, name = place(change.target)
            patch.setattr(owner, name, getattr(owner, name))  # what the worker changes is vLLM's own again afterwards
        # verl's workers die with the process that started them; this one is the tests' own.
        patch.setattr(utils, "set_death_signal", lambda: None)
        extension = "rollout_spec_rl.vllm.verl_extension.VerlExtension"
        options = {"drafter": "suffix", "draft_length": 3, "budget": "fixed:3"}
        yield start(options=options, model=str(tied_policy), worker_extension_cls=extension)


def sync(llm: Any, named: Named, bucket_bytes: int) -> int:
    """Sends the tensors as verl's trainer does; returns how many buckets it took."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    buckets = 0
    original = worker._update_weights

    def count(weights: Sequence[tuple[str, Tensor]], **settings: Any) -> None:
        nonlocal buckets
        buckets += 1
        original(weights, **settings)

    worker._update_weights = count
    sender = BucketedWeightSender(worker._get_zmq_handle(), bucket_size_mb=1, use_shm=True)
    sender.bucket_size = bucket_bytes
    thread = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(iter(named))), daemon=True)
    thread.start()
    try:
        llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
    finally:
        del worker._update_weights
        thread.join(60)
        assert not thread.is_alive(), "verl's sender waits for an answer"
    llm.reset_prefix_cache()
    return buckets


def moved(policy: Path, seed: int) -> tuple[Any, dict[str, Tensor]]:
    """A policy that has learned something, and its weights by all their names: the tied tensor has two, as in verl's state dict."""
    model = load(policy)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert {EMBEDDING, HEAD} <= weights.keys()
    return model, weights


def greedy(model: Any, length: int) -> tuple[int, ...]:
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(length):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(PROMPT) :])


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_head_may_come_in_another_bucket_than_the_embedding(head_first: bool, llm: Any, tied_policy: Path) -> None:
    model, weights = moved(tied_policy, seed=int(head_first))
    largest = max(tensor.nbytes for tensor in weights.values())
    names = sorted(weights, key=lambda name: {EMBEDDING: 2, HEAD: 0}.get(name, 1) if head_first else {EMBEDDING: 0, HEAD: 2}.get(name, 1))
    version = totals_of(llm)["rollout_spec/policy_version"]
    assert sync(llm, [(name, weights[name]) for name in names], largest) > 4
    assert sample(llm, 1, 16, temperature=0)[0] == greedy(model, 16)
    assert totals_of(llm)["rollout_spec/policy_version"] == version + 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (HEAD, "lm_head.weight is tied to model.embed_tokens.weight in vLLM but brings other values"),
        (EMBEDDING, "lm_head.weight is tied to model.embed_tokens.weight in vLLM but model.embed_tokens.weight did not come"),
    ],
    ids=["other values", "no embedding"],
)
@pytest.mark.parametrize("bucket_bytes", [1 << 15, 1 << 20])
def test_a_tied_head_that_is_not_the_embedding_is_refused(fault: str, message: str, bucket_bytes: int, llm: Any, tied_policy: Path) -> None:
    """In one bucket as in many; verl's sender ends, and so does its run."""
    _, weights = moved(tied_policy, seed=5)
    if fault == HEAD:
        weights[HEAD][3, 4] += 0.5
    else:
        del weights[EMBEDDING]
    before = totals_of(llm)["rollout_spec/policy_version"]
    with pytest.raises(ValueError, match=message):
        sync(llm, list(weights.items()), bucket_bytes)
    assert totals_of(llm)["rollout_spec/policy_version"] == before
