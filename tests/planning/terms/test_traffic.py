"""Bytes on the wire against the split of heads itself, and the links they are given to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ithaca.heads import split_heads
from ithaca.planning.memory_plan import Job
from ithaca.planning.model.model_sizes import ModelSizes
from ithaca.planning.terms.traffic import LINK_SHARE, copies_s, exchange_s, exchanged, gather_s, ring_s
from tests.planning.machines import machine
from tests.planning.models import B8, LLAMA_8B, K


def on_the_wire(sizes: ModelSizes, job: Job) -> list[int]:
    """Every rank's bytes forward, as tests/attention/test_exchange.py counts them."""
    split = split_heads(sizes.heads, sizes.kv_heads, job.sp)
    h, k = ([end - start for start, end in ranges] for ranges in (split.q, split.kv))
    key, value, tokens = sizes.key_size, sizes.value_size, job.tokens
    sent = []
    for me in range(job.sp):
        there = tokens * sum(h[r] * key + k[r] * (key + value) for r in range(job.sp) if r != me)
        sent.append(2 * (there + (job.sp - 1) * tokens * h[me] * value))
    return sent


@pytest.mark.parametrize("sp", [2, 4, 8, 16, 32])
def test_bytes_are_those_of_the_split(sp: int) -> None:
    job = Job(32 * K, sp=sp)
    wire = exchanged(B8, job, "save", 1)
    assert {wire.forward_in + wire.forward_out} == set(on_the_wire(B8, job))


def test_an_uneven_split_is_counted_by_its_mean() -> None:
    sizes = ModelSizes.from_config({**LLAMA_8B, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128})
    job = Job(32 * K, sp=8)
    wire, sent = exchanged(sizes, job, "save", 1), on_the_wire(sizes, job)
    assert min(sent) <= wire.forward_in + wire.forward_out <= max(sent)


def test_modes_send_more_or_less() -> None:
    job = Job(32 * K, sp=8)
    keep, save, again = (exchanged(B8, job, mode, 1) for mode in ("keep", "save", "recompute"))  # type: ignore[arg-type]
    # A kept layer has q, k, v as they arrived; otherwise they come again with the output and its gradient.
    assert keep.total < save.total < again.total
    assert keep.backward_in == keep.forward_out
    assert save.backward_in == save.forward_in + 2 * save.forward_out
    assert again.total - save.total == save.forward_in + save.forward_out
    assert exchanged(B8, replace(job, sp=1), "save", 1).total == 0


def test_a_group_inside_a_node_uses_its_link_alone() -> None:
    one, slow = machine(nodes=4), machine(nodes=4, network="Ethernet 10G")
    inside, across = Job(32 * K, sp=8, dp=4), Job(32 * K, sp=32)
    assert exchange_s(one, inside, 10**9) == pytest.approx(1 / (450 * LINK_SHARE), rel=0.02)
    assert exchange_s(slow, inside, 10**9) == exchange_s(one, inside, 10**9)
    # 24 of the 31 others are in other nodes.
    assert exchange_s(one, across, 10**9) == pytest.approx(24 / 31 / (50 * LINK_SHARE), rel=0.02)
    assert exchange_s(slow, across, 10**9) > 30 * exchange_s(one, across, 10**9)
    assert exchange_s(one, Job(K), 10**9) == 0


def test_weights_gathered_in_every_node_keep_off_the_network() -> None:
    slow = machine(nodes=4, network="Ethernet 25G")
    whole, copied = Job(32 * K, sp=8, dp=4), Job(32 * K, sp=8, dp=4, replicas=4)
    assert gather_s(slow, copied, 10**9) < 0.1 * gather_s(slow, whole, 10**9)
    assert copies_s(slow, whole, 10**9) == 0 < copies_s(slow, copied, 10**9)
    assert gather_s(slow, Job(K, weights="none"), 10**9) == 0


def test_a_ring_turns_keys_and_values_only() -> None:
    forward, backward = ring_s(B8, Job(32 * K, ring=8), machine())
    assert 0 < forward < backward
    assert ring_s(B8, Job(32 * K, sp=8), machine()) == (0, 0)
    slower, _ = ring_s(B8, Job(32 * K, ring=8), machine(gpus=4, nodes=2))
    assert slower > 5 * forward
