"""AsyncEngine: requests come and go while others run."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
import torch
from test_engine import PROMPTS, changed_weights, engine, requests, tokens
from tiny import ScriptedDrafter, chain, tiny_model

from rollout_spec.drafters.ngram import NGramDrafter
from rollout_spec.engine.async_engine import AsyncEngine
from rollout_spec.engine.request import Request


def test_requests_that_arrive_at_any_time_get_their_own_tokens() -> None:
    wanted = tokens(engine().generate(requests()))

    async def late(running: AsyncEngine, request: Request, delay_s: float) -> tuple[int, ...]:
        await asyncio.sleep(delay_s)
        return (await running.generate(request)).token_ids

    async def main() -> list[tuple[int, ...]]:
        with AsyncEngine(engine(drafter=NGramDrafter(), config={"max_batch": 2})) as running:
            return await asyncio.gather(*(late(running, request, 0.02 * i) for i, request in enumerate(requests())))

    assert asyncio.run(main()) == wanted


def test_abort_returns_what_there_is_and_resume_goes_on() -> None:
    (wanted,) = tokens(engine().generate([requests(length=60)[1]]))
    with AsyncEngine(engine()) as running:
        whole = dataclasses.replace(requests(length=60)[1], request_id="a")
        future = running.submit(whole)
        running.abort("a").result()
        partial = future.result(timeout=30)
        assert partial.finish_reason == "aborted"
        assert partial.token_ids == wanted[: len(partial.token_ids)]
        assert running.submit(dataclasses.replace(whole, resume=partial)).result(timeout=30).token_ids == wanted


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_cancelling_the_caller_frees_the_slot(delay_s: float) -> None:
    """At once, when the request may not even have been taken, and while it runs."""

    async def main() -> int:
        with AsyncEngine(engine(config={"max_batch": 1})) as running:
            task = asyncio.create_task(running.generate(requests(length=80)[0]))
            await asyncio.sleep(delay_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return len((await asyncio.wait_for(running.generate(requests(length=3)[1]), timeout=30)).token_ids)

    assert asyncio.run(main()) == 3


def test_weights_change_between_rounds() -> None:
    new = changed_weights(tiny_model())
    with AsyncEngine(engine()) as running:
        first = running.submit(requests(length=60)[0])
        report = running.update_weights(new.items(), version=7).result(timeout=30)
        assert report.num_tensors == len(new)
        completion = first.result(timeout=30)
        assert completion.weights_version == 7
        with pytest.raises(ValueError, match="unknown tensor nonsense"):
            running.update_weights([("nonsense", torch.zeros(1))], version=8).result(timeout=30)
        assert running.submit(requests(length=2)[1]).result(timeout=30).weights_version == 7


def test_a_request_that_cannot_be_served_raises_for_its_caller_only() -> None:
    async def main() -> None:
        with AsyncEngine(engine()) as running:
            good = asyncio.create_task(running.generate(requests()[0]))
            with pytest.raises(ValueError, match="empty prompt"):
                await running.generate(dataclasses.replace(requests()[1], prompt_token_ids=()))
            assert (await good).finish_reason == "length"

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_breaks_tells_every_caller() -> None:
    def broken(seen: Sequence[int]) -> list[tuple[int, int]]:
        if len(seen) > len(PROMPTS[0]) + 2:
            raise RuntimeError("the drafter broke")
        return chain([7])

    running = AsyncEngine(engine(drafter=ScriptedDrafter(broken)))
    waiting = [running.submit(request) for request in requests()]
    for future in waiting:
        with pytest.raises(RuntimeError, match="the drafter broke"):
            future.result(timeout=30)
    with pytest.raises(RuntimeError, match="the drafter broke"):
        running.submit(requests()[0]).result(timeout=30)
    running.close()
