"""Gated Delta Net layers over a tree against the recurrence along every path, in torch and in Triton.

Shape legend: B requests, N rows, H heads, dk key size, dv value size, C channels, w window.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
from torch import Tensor

from rollout_spec.engine import gated_delta
from rollout_spec_kernels import gated_delta as chooser

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TREES = {"chain": (-1, 0, 1, 2, 3), "tree": (-1, 0, 0, 1, 1, 2, 3, 6, 5), "root alone": (-1,)}
HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture(params=["torch", "triton"])
def form(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "torch":
        return gated_delta
    if not HAS_TRITON:
        pytest.skip("Triton is not installed: pip install 'rollout-spec[triton]'")
    from rollout_spec_kernels.triton import gated_delta as in_triton

    return in_triton


def _inputs(parents: tuple[int, ...], dk: int, dv: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator, batch, heads, rows = torch.Generator().manual_seed(len(parents)), 2, 3, len(parents)
    drawn = {
        "q": torch.randn(batch, rows, heads, dk, generator=generator) * dk**-0.5,
        "k": torch.nn.functional.normalize(torch.randn(batch, rows, heads, dk, generator=generator), dim=-1),
        "v": torch.randn(batch, rows, heads, dv, generator=generator),
        "log_decay": -3 * torch.rand(batch, rows, heads, generator=generator),
        "beta": torch.rand(batch, rows, heads, generator=generator),
        "state": torch.randn(batch, heads, dk, dv, generator=generator),
    }
    moved = {name: tensor.to(DEVICE, dtype) for name, tensor in drawn.items()}
    return moved | {"parents": torch.tensor(parents, device=DEVICE).expand(batch, -1)}


def _recurrence(given: dict[str, Tensor], path: list[int]) -> tuple[Tensor, Tensor]:
    """The last row's output [B, H, dv] and the state after it, step by step along a path in float64."""
    state = given["state"].double()
    out = torch.empty(0)
    for row in path:
        q, k, v = (given[name][:, row].double() for name in ("q", "k", "v"))
        state = state * given["log_decay"][:, row].double().exp()[..., None, None]
        held = torch.einsum("bhkv,bhk->bhv", state, k)
        state = state + torch.einsum("bhk,bhv->bhkv", k, (v - held) * given["beta"][:, row].double()[..., None])
        out = torch.einsum("bhkv,bhk->bhv", state, q)
    return out, state


def _path(parents: tuple[int, ...], row: int) -> list[int]:
    return [] if row < 0 else [*_path(parents, parents[row]), row]


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize(("dk", "dv"), [(8, 5), (32, 80)])
def test_every_row_and_every_leaf_is_the_recurrence_along_its_path(form: ModuleType, parents: tuple[int, ...], dk: int, dv: int) -> None:
    dtype, tolerance = (torch.float64, 1e-12) if form is gated_delta else (torch.float32, 2e-5)
    given = _inputs(parents, dk, dv, dtype)
    states = form.tree_delta(**given)
    for row in range(len(parents)):
        out, state = _recurrence(given, _path(parents, row))
        torch.testing.assert_close(states.out[:, row].double(), out, rtol=0, atol=tolerance)
        leaves = torch.full((2,), row, device=DEVICE)
        got = form.commit_state(given["k"], states, given["parents"], leaves, given["state"])
        torch.testing.assert_close(got.double(), state, rtol=0, atol=tolerance)


def test_a_row_sees_nothing_of_its_siblings(form: ModuleType) -> None:
    """Also where they decay so strongly that a quotient of decays would overflow."""
    given = _inputs(TREES["tree"], 8, 5, torch.float32)
    wanted = form.tree_delta(**given).out
    given["log_decay"][:, 2] = -200.0
    given["v"][:, 2] = 1e6
    got = form.tree_delta(**given).out
    apart = [row for row in range(9) if 2 not in _path(TREES["tree"], row)]
    torch.testing.assert_close(got[:, apart], wanted[:, apart], rtol=0, atol=1e-5)
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("window", [2, 4])
def test_convolution_runs_along_ancestors(form: ModuleType, parents: tuple[int, ...], window: int) -> None:
    generator, channels = torch.Generator().manual_seed(window), 150
    x = torch.randn(2, len(parents), channels, generator=generator).to(DEVICE)
    history = torch.randn(2, channels, window - 1, generator=generator).to(DEVICE)
    weight = torch.randn(channels, window, generator=generator).to(DEVICE)
    got = form.tree_convolution(x, history, weight, torch.tensor(parents, device=DEVICE).expand(2, -1).contiguous())
    for row in range(len(parents)):
        line = torch.cat([history, x[:, _path(parents, row)].transpose(1, 2)], dim=2).double()
        wanted = (line[:, :, -window:] * weight.double()).sum(-1)
        torch.testing.assert_close(got[:, row].double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("window", [2, 4])
def test_the_history_after_a_row_is_the_end_of_its_path(parents: tuple[int, ...], window: int) -> None:
    generator = torch.Generator().manual_seed(window)
    x = torch.randn(2, len(parents), 3, generator=generator)
    history = torch.randn(2, 3, window - 1, generator=generator)
    for row in range(len(parents)):
        got = gated_delta.commit_history(x, history, torch.tensor(parents).expand(2, -1), torch.tensor([row, row]))
        line = torch.cat([history, x[:, _path(parents, row)].transpose(1, 2)], dim=2)
        assert torch.equal(got, line[:, :, line.shape[2] - (window - 1) :])


def test_the_kernels_choose_torch_for_tensors_on_the_cpu() -> None:
    given = _inputs(TREES["tree"], 8, 5, torch.float64)
    chosen, readable = chooser.tree_delta(**given), gated_delta.tree_delta(**given)
    assert torch.equal(chosen.out, readable.out)
    leaves = torch.tensor([3, 8], device=DEVICE)
    states = (form.commit_state(given["k"], readable, given["parents"], leaves, given["state"]) for form in (chooser, gated_delta))
    assert torch.equal(*states)


def test_shapes_that_do_not_fit_are_refused(form: ModuleType) -> None:
    given = _inputs(TREES["tree"], 8, 5, torch.float32)
    with pytest.raises(ValueError, match="beta must be"):
        form.tree_delta(**given | {"beta": given["beta"][:, :3]})
