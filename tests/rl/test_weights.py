"""Weights on their way: what arrives is what was sent, or an error that names the tensor."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import AsyncIterator, Iterable

import pytest
import torch
from torch import Tensor

from rollout_spec.engine.weights import WeightsReport, checksums, combine
from rollout_spec_rl.verl.weights import WeightBucket, WeightInbox, buckets, check_held


def named(count: int = 4, size: int = 8) -> list[tuple[str, Tensor]]:
    return [(f"layer.{index}", torch.randn(size)) for index in range(count)]


def packed(tensors: Iterable[tuple[str, Tensor]], limit: int, version: int = 1) -> list[WeightBucket]:
    async def source() -> AsyncIterator[tuple[str, Tensor]]:
        for pair in tensors:
            yield pair

    async def collect() -> list[WeightBucket]:
        return [bucket async for bucket in buckets(source(), version, limit)]

    return asyncio.run(collect())


@pytest.mark.parametrize(("limit", "sizes"), [(64, [2, 2]), (32, [1, 1, 1, 1]), (1, [1, 1, 1, 1]), (10**6, [4]), (96, [3, 1])])
def test_buckets_keep_order_and_limit(limit: int, sizes: list[int]) -> None:
    tensors = named()
    made = packed(tensors, limit)
    assert [len(bucket.tensors) for bucket in made] == sizes
    assert [name for bucket in made for name, _ in bucket.tensors] == [name for name, _ in tensors]
    flat = [tensor for bucket in made for _, tensor in bucket.checked()]
    assert all(torch.equal(got, sent) for got, (_, sent) in zip(flat, tensors, strict=True))


def test_no_weights_make_no_bucket_and_no_size_is_an_error() -> None:
    assert packed([], 64) == []
    with pytest.raises(ValueError, match="bucket size must be positive"):
        packed(named(), 0)


def test_a_bucket_owns_its_tensors() -> None:
    """The trainer's next step changes its weights in place while the bucket is on its way."""
    tensors = named(1)
    (bucket,) = packed(tensors, 64)
    tensors[0][1].zero_()
    ((_, kept),) = bucket.checked()
    assert bool((kept != 0).all())


def test_a_bucket_travels_without_copies() -> None:
    """Everything but names goes out of band, and is read where it lies, in memory that cannot be written."""
    tensors = [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(4, 2).to(torch.bfloat16)),
        ("scalar", torch.tensor(2.5)),
        ("none", torch.zeros(0, 7)),
    ]
    bucket = WeightBucket.pack(3, tensors)
    beside: list[pickle.PickleBuffer] = []
    data = pickle.dumps(bucket, protocol=5, buffer_callback=beside.append)
    assert len(beside) == len(tensors)
    got = pickle.loads(data, buffers=[bytes(buffer) for buffer in beside])
    assert (got.version, got.checksums) == (3, bucket.checksums)
    for (name, tensor), (sent_name, sent) in zip(got.checked(), tensors, strict=True):
        assert name == sent_name
        assert tensor.dtype == sent.dtype
        assert tensor.shape == sent.shape
        assert torch.equal(tensor, sent)


def test_a_changed_bit_is_named() -> None:
    bucket = WeightBucket.pack(1, named())
    bucket.tensors[2][1].view(torch.int32)[3] ^= 1
    with pytest.raises(ValueError, match=r"layer\.2 arrived with other bytes"):
        bucket.checked()


def test_transposed_and_bfloat16_tensors_travel() -> None:
    tensors = [("a", torch.randn(3, 5).T), ("b", torch.randn(7).bfloat16()), ("c", torch.zeros(0))]
    for (_, got), (_, sent) in zip(WeightBucket.pack(1, tensors).checked(), tensors, strict=True):
        assert torch.equal(got, sent)


def test_inbox_gives_everything_once() -> None:
    inbox, tensors = WeightInbox(), named()
    for bucket in packed(tensors, 64, version=5):
        inbox.add(bucket)
    assert [name for name, _ in inbox.take(5, 4)] == [name for name, _ in tensors]
    with pytest.raises(ValueError, match="4 tensors were sent, 0 tensors of version None arrived"):
        inbox.take(5, 4)


def test_a_lost_bucket_is_an_error() -> None:
    inbox = WeightInbox()
    inbox.add(packed(named(), 64)[0])
    with pytest.raises(ValueError, match="4 tensors were sent, 2 tensors of version 1 arrived"):
        inbox.take(1, 4)


def test_a_sender_that_died_leaves_nothing_behind() -> None:
    inbox, tensors = WeightInbox(), named()
    inbox.add(packed(named(), 64, version=1)[0])
    for bucket in packed(tensors, 64, version=2):
        inbox.add(bucket)
    assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(inbox.take(2, 4), tensors, strict=True))
    with pytest.raises(ValueError, match="weights version 3"):
        inbox.take(3, 4)


def report(held: dict[str, Tensor]) -> WeightsReport:
    sums = checksums(held)
    return WeightsReport(version=1, num_tensors=len(held), checksum=combine(sums), tensor_checksums=sums)


def test_what_the_engine_holds_is_compared_in_its_own_precision() -> None:
    tensors = [*named(2), ("head", torch.randn(4))]
    held = {"layer.0": tensors[0][1].bfloat16(), "layer.1": tensors[1][1].bfloat16(), "embedding": tensors[2][1].bfloat16()}
    precisions = dict.fromkeys(held, torch.bfloat16)
    check_held(tensors, report(held), precisions, {"head": "embedding"})
    held["layer.1"] = held["layer.1"].clone()
    held["layer.1"][0] += 1
    with pytest.raises(RuntimeError, match=r"holds other values of layer\.1$"):
        check_held(tensors, report(held), precisions, {"head": "embedding"})


def test_buckets_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WeightBucket.pack(1, named()).version = 2  # type: ignore[misc]
