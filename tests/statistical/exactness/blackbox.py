"""The exact output law of a verify function seen only from outside: noise in, verdict out.

A verdict is a step function of the uniforms it was reached with. ``partition`` finds the steps by bisection, uniform by uniform, on a grid
of 2**-48, and returns the boxes of noise on which the verdict is constant; their volumes are the probabilities. Nothing of the
verifier is patched or re-implemented, so the same code measures any backend. A slow one is measured with a guide: another verifier whose
steps are found first, around which the slow one's are looked for.

Shape legend: M drafts, C cells, D depths, T trials, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify import DenseNoise, DenseTarget, Scheme, VerifyFn

GRID = 1 << 48
TOP = GRID - 1


@dataclass(frozen=True)
class Cells:
    """Boxes of noise: ``weights[c]`` is the probability, given draft ``drafts[c]``, of the verdict in row c."""

    drafts: Tensor  # [C]
    weights: Tensor  # [C] float64
    verdict: Verdict
    token_ids: Tensor  # [C, D + 1] emitted tokens, NO_TOKEN after them


class _Asked(DenseNoise):
    """Dense noise that remembers which uniforms were asked for."""

    def __init__(self, accept: Tensor, recover: Tensor, asked: set[tuple[int, int]], drawn: set[int]) -> None:
        super().__init__(accept=accept.double() / GRID, recover=recover.double() / GRID)
        self.asked, self.drawn = asked, drawn

    def accept(self, requests: Tensor, depths: Tensor, trial: int) -> Tensor:
        self.asked.update((depth, trial) for depth in depths.unique().tolist())
        return super().accept(requests, depths, trial)

    def recover(self, requests: Tensor, depths: Tensor) -> Tensor:
        self.drawn.update(depths.unique().tolist())
        return super().recover(requests, depths)


@dataclass
class _Boxes:
    """Boxes under refinement. ``low``/``high`` bound every uniform; the representative point is where it has been run."""

    drafts: Tensor  # [C]
    point: Tensor  # [C, K] grid coordinates; K = all acceptance uniforms, then all recovery uniforms
    low: Tensor  # [C, K]
    high: Tensor  # [C, K], exclusive
    split: Tensor  # [C, K] bool: the verdict is known to be constant between low and high


@dataclass(frozen=True)
class Guide:
    """A verifier that is fast, and believed to decide as the measured one does but for uniforms within ``slack`` of a step.

    Where that is so, two looks replace a bisection and leave the step uncertain by 2 slack; where it is not, bisection goes that far.
    """

    verify: VerifyFn
    slack: int = GRID >> 20


class _Partition:
    def __init__(self, verify: VerifyFn, tree: DraftTree, target_probs: Tensor, scheme: Scheme, guide: Guide | None = None) -> None:
        self.verify, self.tree, self.target_probs, self.scheme = verify, tree, target_probs, scheme
        self.guide = None if guide is None else _Partition(guide.verify, tree, target_probs, scheme)
        self.slack = 0 if guide is None else guide.slack
        self.known: dict[tuple[int, ...], int] = {}  # codes of points, where they are dear
        self.depths = int(tree.depths().max()) + 1 if tree.max_nodes else 1
        self.trials = tree.max_nodes + 1
        self.asked: set[tuple[int, int]] = set()
        self.drawn: set[int] = set()

    @property
    def num_accept(self) -> int:
        return self.depths * self.trials

    def run(self, drafts: Tensor, point: Tensor) -> tuple[Tensor, Verdict]:
        """[C] a number that tells verdicts apart, and the verdicts."""
        accept = point[:, : self.num_accept].view(-1, self.depths, self.trials)
        noise = _Asked(accept, point[:, self.num_accept :], self.asked, self.drawn)
        verdict = self.verify(take(self.tree, drafts), DenseTarget(self.target_probs[drafts]), noise, self.scheme)
        path = torch.nn.functional.pad(verdict.path, (1, 0), value=-1)
        last = path.gather(1, verdict.num_accepted[:, None])[:, 0]
        return (last + 1) * self.target_probs.shape[2] + verdict.next_token_ids, verdict

    def start(self) -> _Boxes:
        # An acceptance uniform that is not decided yet stands at "refuse", so that deciding another one shows in the verdict.
        size = (self.tree.batch_size, self.num_accept + self.depths)
        point = torch.zeros(size, dtype=torch.int64)
        point[:, : self.num_accept] = TOP
        drafts = torch.arange(size[0])
        return _Boxes(drafts, point, torch.zeros_like(point), torch.full_like(point, GRID), torch.zeros(size, dtype=torch.bool))

    def codes(self, drafts: Tensor, point: Tensor) -> Tensor:
        """[C] ``run``'s numbers. With a guide a point is run once."""
        if self.guide is None:
            return self.run(drafts, point)[0]
        keys = [tuple(row) for row in torch.cat([drafts[:, None], point], dim=1).tolist()]
        new = {key: row for row, key in enumerate(keys) if key not in self.known}
        if new:
            rows = torch.tensor(list(new.values()))
            self.known.update(zip(new, self.run(drafts[rows], point[rows])[0].tolist(), strict=True))
        return torch.tensor([self.known[key] for key in keys], dtype=torch.int64)

    def refine(self, boxes: _Boxes, column: int) -> tuple[_Boxes, bool]:
        """Split the boxes along one uniform, wherever the verdict depends on it."""
        first = self.codes(boxes.drafts, self._at(boxes, column, 0))
        last = self.codes(boxes.drafts, self._at(boxes, column, TOP))
        depends = ~boxes.split[:, column] & (first != last)
        if not bool(depends.any()):
            return boxes, False
        done = [_select(boxes, ~depends)]
        current = _select(boxes, depends)
        last, low = last[depends], torch.zeros(int(depends.sum()), dtype=torch.int64)
        while low.numel():
            step = self._first_change(current, column, low)
            done.append(_box(current, column, low, step))
            final = self.codes(current.drafts, self._at(current, column, step)) == last
            done.append(_select(_box(current, column, step, torch.full_like(step, GRID)), final))
            current, last, low = _select(current, ~final), last[~final], step[~final]
        return _concat(done), True

    def _first_change(self, boxes: _Boxes, column: int, low: Tensor) -> Tensor:
        """[C] the first grid point above low where the verdict differs from the one at low; it does differ at the top."""
        start = self.codes(boxes.drafts, self._at(boxes, column, low))
        same, differs = low.clone(), torch.full_like(low, TOP)
        if self.guide is not None:
            guess = self.guide._first_change(boxes, column, low)
            below, above = torch.maximum(guess - self.slack, low), (guess + self.slack).clamp_max(TOP)
            holds = self.codes(boxes.drafts, self._at(boxes, column, below)) == start
            changed = self.codes(boxes.drafts, self._at(boxes, column, above)) != start
            same = torch.where(holds, below, same)
            differs = torch.where(~holds, below, torch.where(changed, above, differs))
        while True:
            rows = (differs - same > max(1, 2 * self.slack)).nonzero()[:, 0]
            if not rows.numel():
                return differs
            middle = (same[rows] + differs[rows]) // 2
            still = self.codes(boxes.drafts[rows], self._at(_select(boxes, rows), column, middle)) == start[rows]
            same[rows], differs[rows] = torch.where(still, middle, same[rows]), torch.where(still, differs[rows], middle)

    @staticmethod
    def _at(boxes: _Boxes, column: int, value: Tensor | int) -> Tensor:
        point = boxes.point.clone()
        point[:, column] = torch.where(boxes.split[:, column], point[:, column], value)
        return point


def partition(verify: VerifyFn, tree: DraftTree, target_probs: Tensor, scheme: Scheme, guide: Guide | None = None, seed: int = 0) -> Cells:
    """Every verdict on every draft of the tree batch [M] with its probability; target_probs [M, N + 1, V] float64.

    Each box is visited once more at a random point: a verdict that is not constant on its box fails an assertion.
    """
    work = _Partition(verify, tree, target_probs, scheme, guide)
    boxes = work.start()
    boxes = _until_stable(work, boxes, lambda: [depth * work.trials + trial for depth, trial in sorted(work.asked)])
    boxes = _until_stable(work, boxes, lambda: [work.num_accept + depth for depth in sorted(work.drawn)])
    codes, verdict = work.run(boxes.drafts, boxes.point)
    generator = torch.Generator().manual_seed(seed)
    width = (boxes.high - boxes.low).double()
    inside = boxes.low + (torch.rand(width.shape, generator=generator, dtype=torch.float64) * width).long().clamp_max(TOP)
    top = torch.maximum(boxes.high - 1 - 2 * work.slack, boxes.low)  # where a step is uncertain, the lower box has the doubt
    assert torch.equal(work.run(boxes.drafts, torch.minimum(inside, top))[0], codes), "a verdict changes inside its box of noise"
    tokens = verdict.emitted(take(tree, boxes.drafts))
    return Cells(boxes.drafts, (width / GRID).prod(1), verdict, tokens)


def gumbel_cells(verify: VerifyFn, tree: DraftTree, target_probs: Tensor, joint: Tensor, length: int) -> Cells:
    """The Gumbel-coupled scheme over every outcome of the races: token w[d] wins at depth d with the target's joint probability.

    The winner of a race is a draw from the target's law (the algebraic proof); noise that makes w win at every depth stands for
    all noise that does. joint [V**length] is the target's law of the winners.
    """
    vocab_size, num_drafts = target_probs.shape[2], tree.batch_size
    codes = torch.arange(joint.numel())
    winners = torch.stack([codes // vocab_size ** (length - 1 - depth) % vocab_size for depth in range(length)], dim=1)
    possible = joint > 0
    winners, weights = winners[possible], joint[possible]
    noise = torch.nn.functional.one_hot(winners, vocab_size).double() * 1e3
    drafts = torch.arange(num_drafts).repeat_interleave(winners.shape[0])
    verdict = verify(
        take(tree, drafts), DenseTarget(target_probs[drafts]), DenseNoise(gumbel=noise.repeat(num_drafts, 1, 1)), Scheme.GUMBEL
    )
    return Cells(drafts, weights.repeat(num_drafts), verdict, verdict.emitted(take(tree, drafts)))


def take(tree: DraftTree, rows: Tensor) -> DraftTree:
    """The tree batch's rows, in that order."""
    return replace(
        tree,
        token_ids=tree.token_ids[rows],
        parents=tree.parents[rows],
        num_nodes=tree.num_nodes[rows],
        draft_probs=None if tree.draft_probs is None else tree.draft_probs[rows],
    )


def _until_stable(work: _Partition, boxes: _Boxes, columns: Callable[[], list[int]]) -> _Boxes:
    work.run(boxes.drafts, boxes.point)
    changed = True
    while changed:
        changed = False
        for column in columns():
            boxes, more = work.refine(boxes, column)
            changed |= more
    return boxes


def _select(boxes: _Boxes, rows: Tensor) -> _Boxes:
    return _Boxes(boxes.drafts[rows], boxes.point[rows], boxes.low[rows], boxes.high[rows], boxes.split[rows])


def _box(boxes: _Boxes, column: int, low: Tensor, high: Tensor) -> _Boxes:
    """The slice low <= u < high of boxes."""
    out = _select(boxes, torch.ones_like(boxes.drafts, dtype=torch.bool))
    out.point[:, column], out.low[:, column], out.high[:, column], out.split[:, column] = low, low, high, True
    return out


def _concat(parts: list[_Boxes]) -> _Boxes:
    return _Boxes(*(torch.cat([getattr(part, name) for part in parts]) for name in ("drafts", "point", "low", "high", "split")))
