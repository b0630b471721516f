"""When to look again: probes while nothing is drafted, and rounds without a draft while everything is.

Both are rare, and what they look at is what the ordinary rounds of that time do not show. Probes may take a share of the time: a cheap
drafter is probed often, one whose drafts take as long as a round seldom.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Shares are of all time, counts are of rounds."""

    news_requests: int = 32  # drafted for at once after weights changed, whatever is expected of it: how the drafter does now
    doubt_requests: int = 8  # drafted for in every round while drafting may well pay
    news_share: float = 0.04  # spent on probes after weights changed or acceptance jumped ...
    first_share: float = 0.008  # ... or the policy's entropy changed ...
    backoff: float = 0.75  # ... times this after each probe that changed nothing ...
    last_share: float = 0.002  # ... down to this
    at_least: int = 8  # rounds between two probes
    at_most: int = 400
    length: int = 1  # drafted tokens of a probe
    num_requests: int = 2  # drafted for in a probe, in rotation, or a part of the batch:
    batch_share: float = 0.125
    entropy_change: float = 0.35  # relative change of the policy's entropy after which a probe is due as after a change of weights
    reference_every: int = 96  # rounds between two without a draft where the expected gain is small, four times as many where it is not
    small_gain: float = 0.2

    def __post_init__(self) -> None:
        for name in ("news_requests", "doubt_requests"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("at_least", "length", "num_requests", "reference_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.at_most < self.at_least:
            raise ValueError(f"at_most {self.at_most} is less than at_least {self.at_least}")
        if not 0 < self.last_share <= self.first_share <= self.news_share <= 1:
            shares = f"{self.last_share}, {self.first_share} and {self.news_share}"
            raise ValueError(f"0 < last_share <= first_share <= news_share <= 1 does not hold for {shares}")
        if not 0 < self.backoff <= 1:
            raise ValueError(f"backoff must be in (0, 1], got {self.backoff}")

    def missing(self, num_asked: float) -> int:
        """Requests still to be drafted for at once, when so many were since weights changed."""
        return max(self.news_requests - int(min(num_asked, self.news_requests)), 0)


@dataclass(frozen=True, kw_only=True)
class ProbeState:
    """Immutable: a decision returns the next one."""

    epoch: int = -1  # of the forecast that it belongs to
    entropy: float = 0.0  # when patience started
    share: float = 0.0  # of the time that probes may take now
    drafting: bool = False  # what the latest ordinary decision was
    num_off: int = 0  # rounds without a draft since the last probe
    num_drafting: int = 0  # rounds with a draft since the last one without
    turn: int = 0  # of the rotation of requests

    def enter(self, epoch: int, entropy: float, config: ProbeConfig) -> ProbeState:
        """Weights, the law or the policy's entropy changed: patience starts again."""
        if epoch != self.epoch:
            # Look at once, and soon again.
            return replace(self, epoch=epoch, entropy=entropy, share=config.news_share, num_off=config.at_most)
        if abs(entropy - self.entropy) <= config.entropy_change * (self.entropy + 0.25):
            return self
        return replace(self, entropy=entropy, share=config.first_share)

    def wants_probe(self, cost: float, num_missing: int, config: ProbeConfig) -> bool:
        """cost: how much longer than another a round with a probe takes, relatively; what it drafts is not lost, but likely refused."""
        return num_missing > 0 or self.num_off >= min(max(max(cost, 0.0) / self.share, config.at_least), config.at_most)

    def wants_reference(self, gain: float, config: ProbeConfig) -> bool:
        return self.num_drafting >= config.reference_every * (1 if gain < config.small_gain else 4)

    def probed(self, num_requests: int, config: ProbeConfig) -> ProbeState:
        share = max(self.share * config.backoff, config.last_share)
        return replace(self, drafting=False, num_off=0, share=share, turn=self.turn + num_requests)

    def stayed_off(self, num_rounds: int) -> ProbeState:
        """num_rounds: since the latest decision, which this one repeats."""
        return replace(self, drafting=False, num_off=self.num_off + num_rounds, num_drafting=0)

    def drafted(self, num_rounds: int, config: ProbeConfig) -> ProbeState:
        return replace(self, drafting=True, num_off=0, share=config.first_share, num_drafting=self.num_drafting + num_rounds)

    def looked_without(self) -> ProbeState:
        return replace(self, num_drafting=0)

    def chosen(self, batch: int, num_missing: int, config: ProbeConfig) -> list[int]:
        """Whom a probe drafts for."""
        wanted = max(config.num_requests, round(config.batch_share * batch), num_missing)
        return [(self.turn + i) % batch for i in range(min(wanted, batch))]
