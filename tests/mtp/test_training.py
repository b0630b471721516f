"""The trainer: it learns, resumes to the bit, leaves the policy alone, and splits over processes without a difference."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_tiny import ListSink, collect, tiny_policy, train_config, trainer_for

from rollout_spec.events import TrainEvent
from rollout_spec.sinks import read_events
from rollout_spec_mtp.losses import DraftBatch, Extra, LossConfig, chunked_loss, chunked_stats
from rollout_spec_mtp.training.config import load_config
from rollout_spec_mtp.training.protocol import PolicyParts
from rollout_spec_mtp.training.shards import RolloutSet
from rollout_spec_mtp.training.trainer import assert_policy_frozen, check_resume, checkpoints


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> RolloutSet:
    return collect(tiny_policy(), tmp_path_factory.mktemp("rollouts"))


def test_training_lengthens_what_is_accepted(trained: Any) -> None:
    before, after = trained.lengths
    assert after > before + 0.3


@pytest.mark.parametrize("loss", [{"ce": 1.0}, {"kl": 1.0}, {"hybrid": 1.0}, {"e2e_tv": 1.0}, {"block_length": 1.0}])
def test_each_loss_falls(rollouts: RolloutSet, tmp_path: Path, loss: dict[str, float]) -> None:
    config = train_config(phases=[{"share": 1.0, "loss": loss}], train={"epochs": 8, "rows_per_step": 4, "micro_rows": 4})
    sink = ListSink()
    trainer, _ = trainer_for(config, tiny_policy(), rollouts, tmp_path, sink)
    trainer.run(lambda step, metrics: None)
    losses = [event.loss for event in sink.events if isinstance(event, TrainEvent)]
    third = len(losses) // 3
    assert sum(losses[-third:]) < sum(losses[:third])


def test_a_phase_of_fewer_slots_trains_those_alone(rollouts: RolloutSet, tmp_path: Path) -> None:
    whole, short = ([{"share": 1.0, "loss": {"kl": 1.0}, **slots}] for slots in ({}, {"slots": 1}))
    sink, reference = ListSink(), ListSink()
    for phases, length, seen, out in ((short, 3, sink, "a"), (whole, 1, reference, "b")):
        config = train_config(phases=phases, drafter={"settings": {"draft_length": length}}, train={"epochs": 1})
        trainer, _ = trainer_for(config, tiny_policy(), rollouts, tmp_path / out, seen)
        for step in range(3):
            trainer._report(step, trainer._step(step))
    # Training the first of three slots is training a head of one slot, where a response is long enough for either.
    assert [e.loss for e in sink.events] == pytest.approx([e.loss for e in reference.events], rel=1e-5)
    with pytest.raises(ValueError, match=r"slots 4 cannot be trained .* it drafts 3 tokens"):
        trainer_for(train_config(phases=[{"share": 1.0, "loss": {"kl": 1.0}, "slots": 4}]), tiny_policy(), rollouts, tmp_path / "c")


def test_policy_gets_no_gradient_and_shares_no_parameter(rollouts: RolloutSet, tmp_path: Path) -> None:
    policy = tiny_policy()
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    trainer, model = trainer_for(train_config(), policy, rollouts, tmp_path)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer._step(0)
    trainer._step(1)  # what feeds a projection that starts at zero has no gradient in the first step
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in policy.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, start[name])]
    assert not still, f"not trained: {still}"
    model.stolen = policy.lm_head.weight
    with pytest.raises(AssertionError, match="would train the policy's own storage: stolen"):
        assert_policy_frozen(model, PolicyParts.of(policy))


def _losses(sink: ListSink) -> dict[int, tuple[float, ...]]:
    return {e.step: (e.loss, *(v for _, v in sorted(e.metrics.items()))) for e in sink.events if isinstance(e, TrainEvent)}


@pytest.mark.parametrize("ema", [None, 0.9])
def test_resumed_run_is_the_unbroken_one_bit_for_bit(rollouts: RolloutSet, tmp_path: Path, ema: float | None) -> None:
    config = train_config(train={"epochs": 4, "ema_decay": ema, "checkpoint_steps": 3}, evaluate={"every_steps": 4})
    unbroken = ListSink()
    trainer, model = trainer_for(config, tiny_policy(), rollouts, tmp_path / "a", unbroken)
    trainer.run(lambda step, metrics: None)
    assert trainer.num_steps > 8

    class KilledError(Exception):
        pass

    def kill(step: int, metrics: dict[str, float]) -> None:
        if step == 8:
            raise KilledError

    first, second = ListSink(), ListSink()
    broken, _ = trainer_for(config, tiny_policy(), rollouts, tmp_path / "b", first)
    with pytest.raises(KilledError):
        broken.run(kill)
    torch.manual_seed(999)
    resumed, resumed_model = trainer_for(config, tiny_policy(), rollouts, tmp_path / "b", second)
    assert resumed.resume() == 6
    resumed.run(lambda step, metrics: None)
    assert {**_losses(first), **_losses(second)} == _losses(unbroken)
    assert min(_losses(second)) == 6
    for one, other in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert resumed.progress.best_length == trainer.progress.best_length


def test_accumulated_micro_batches_have_the_gradient_of_the_whole(rollouts: RolloutSet, tmp_path: Path) -> None:
    gradients = []
    for micro in (1, 4):
        config = train_config(train={"rows_per_step": 4, "micro_rows": micro, "lr": 1e-12, "max_grad_norm": 1e9})
        trainer, model = trainer_for(config, tiny_policy(), rollouts, tmp_path / str(micro))
        trainer._step(0)
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)


def test_patience_ends_a_run_that_does_not_improve(rollouts: RolloutSet, tmp_path: Path) -> None:
    config = train_config(train={"lr": 1e-12, "epochs": 30}, evaluate={"every_steps": 1, "patience": 2})
    trainer, _ = trainer_for(config, tiny_policy(), rollouts, tmp_path)
    trainer.run(lambda step, metrics: None)
    assert trainer.progress.step < trainer.num_steps / 2


def test_only_whole_checkpoints_are_resumed_from_and_few_are_kept(rollouts: RolloutSet, tmp_path: Path) -> None:
    trainer, _ = trainer_for(train_config(train={"checkpoint_steps": 1, "epochs": 2}), tiny_policy(), rollouts, tmp_path)
    trainer.run(lambda step, metrics: None)
    found = checkpoints(tmp_path)
    assert len(found) == 2
    (tmp_path / "checkpoints" / "step-9999999.part").mkdir()
    assert checkpoints(tmp_path) == found


def test_runs_are_neither_overwritten_nor_mixed(tmp_path: Path) -> None:
    check_resume(tmp_path, {"a": 1}, resume=False)
    check_resume(tmp_path, {"a": 2}, resume=False)  # nothing was trained yet
    (tmp_path / "checkpoints" / "step-0000001").mkdir(parents=True)
    with pytest.raises(ValueError, match="already holds a training run"):
        check_resume(tmp_path, {"a": 2}, resume=False)
    check_resume(tmp_path, {"a": 2}, resume=True)
    with pytest.raises(ValueError, match=r"\(a differ\)"):
        check_resume(tmp_path, {"a": 3}, resume=True)


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_known_normaliser_gives_the_loss_and_gradient_of_the_whole_teacher(reduced: bool, temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    student = torch.randn(9, 3, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    target, head = (torch.randn(rows, 8, generator=generator, dtype=torch.float64) for rows in (12, 31))
    ids = torch.arange(0, 31, 3) if reduced else None
    common: dict[str, Any] = {
        "target_hidden": target,
        "target_rows": torch.randint(12, (9, 3), generator=generator),
        "token_ids": torch.randint(31, (9, 3), generator=generator),
        "valid": torch.rand(9, 3, generator=generator) > 0.3,
        "student_head": head if ids is None else head[ids],
        "target_head": head,
        "draft_token_ids": ids,
        "temperature": temperature,
    }
    lse = (target @ head.T / temperature).logsumexp(-1)
    config = LossConfig(hybrid=1.0, e2e_tv=0.5, block_length=0.7, ce=0.1)
    results = []
    for known in (None, lse):
        output = chunked_loss(DraftBatch(student_hidden=student, target_lse=known, **common), config, chunk_bytes=1)
        (gradient,) = torch.autograd.grad(output.loss, student)
        results.append((output, gradient))
    (whole, whole_gradient), (fast, fast_gradient) = results
    torch.testing.assert_close(fast.loss, whole.loss)
    torch.testing.assert_close(fast_gradient, whole_gradient)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(fast.metrics[name], value)
    batch = DraftBatch(student_hidden=student, target_lse=lse, **common)
    with pytest.raises(ValueError, match="target entropies need the whole rows"):
        chunked_stats(batch, frozenset({Extra.TARGET_ENTROPIES}))
    with pytest.raises(ValueError, match="target_lse must be"):
        DraftBatch(student_hidden=student, target_lse=lse[:3], **common)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.speed=1", "config.train: unknown keys speed"),
        ("train.lr=fast", "config.train.lr must be of type float"),
        ("train.micro_rows=3", "multiple of train.micro_rows"),
        ("collect.temperature=0", "greedy policy"),
        ("nonsense", "give section.key=value"),
        ("model.x=1", "is no section"),
    ],
)
def test_config_file_of_the_repository_loads_and_wrong_overrides_are_refused(repository_root: Path, override: str, message: str) -> None:
    path = repository_root / "configs" / "drafter" / "mtp_smollm2.yaml"
    assert load_config(path, ["train.lr=3e-4"]).train.lr == 3e-4
    with pytest.raises(ValueError, match=message):
        load_config(path, [override])


def test_phases_change_at_their_shares() -> None:
    config = train_config(phases=[{"share": 0.25, "loss": {"kl": 1.0}}, {"share": 0.75, "loss": {"e2e_tv": 1.0}}])
    assert [config.phase_at(step, 8).loss.kl for step in range(8)] == [1.0] * 2 + [0.0] * 6
    with pytest.raises(ValueError, match="add up to 1"):
        train_config(phases=[{"share": 0.5, "loss": {"kl": 1.0}}])
    rates = [config.train.lr_at(step, 20) for step in range(20)]
    assert rates[:3] == pytest.approx([5e-3 / 3, 1e-2 / 3, 5e-3])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] >= 5e-4


def _one_of_two(rank: int, port: int, folder: Path, rollouts: Path) -> None:
    """A process of a gloo pair: one step, its gradients to a file."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    config = train_config(train={"rows_per_step": 4, "micro_rows": 1, "max_grad_norm": 1e9})
    trainer, model = trainer_for(config, tiny_policy(), RolloutSet(rollouts), folder / f"out{rank}")
    trainer._step(0)
    torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    collect(tiny_policy(), tmp_path / "rollouts")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_one_of_two, args=(rank, port, tmp_path, tmp_path / "rollouts")) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    assert [process.exitcode for process in processes] == [0, 0]
    config = train_config(train={"rows_per_step": 4, "micro_rows": 4, "max_grad_norm": 1e9})
    trainer, model = trainer_for(config, tiny_policy(), RolloutSet(tmp_path / "rollouts"), tmp_path / "one")
    trainer._step(0)
    for rank in range(2):
        gradients = torch.load(tmp_path / f"{rank}.pt")
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.model
def test_command_survives_sigkill(tmp_path: Path, smollm2_dir: Path, repository_root: Path) -> None:
    """The real command on the real model, killed in mid-training and resumed, ends with the losses of an unbroken run."""
    settings = [
        "collect.prompts=gsm_symbolic:24@10000",
        "collect.max_new_tokens=48",
        "collect.max_tokens=900",
        "train.epochs=3",
        "train.rows_per_step=1",
        "train.micro_rows=1",
        "train.checkpoint_steps=2",
        "evaluate.held_out=0.2",
        "evaluate.every_steps=4",
        "evaluate.served_prompts=null",
    ]
    command = [
        sys.executable,
        "-m",
        "rollout_spec_rl.compose",
        "train-drafter",
        "-c",
        str(repository_root / "configs/drafter/mtp_smollm2.yaml"),
    ]
    for setting in settings:
        command += ["--set", setting]

    def losses(folder: Path) -> dict[int, float]:
        return {event.step: event.loss for event in read_events(folder / "train.jsonl") if isinstance(event, TrainEvent)}

    subprocess.run([*command, "--out", str(tmp_path / "whole")], check=True, capture_output=True)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "rollouts").symlink_to(tmp_path / "whole" / "rollouts")
    running = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while len(checkpoints(tmp_path / "killed")) < 2:
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    subprocess.run([*command, "--out", str(tmp_path / "killed"), "--resume"], check=True, capture_output=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    reports = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("whole", "killed")]
    assert reports[0] == reports[1]
