"""Bytes that the kernels of products ask memory for, and their threads: counted, on no GPU."""

from __future__ import annotations

import pytest
from jacsparse.spgemm import plan_product

from tests.cuda.harness import ON_GPU
from tests.cuda.traffic import pooling, pruned_convolutions, traffic_of

pytestmark = pytest.mark.skipif(ON_GPU, reason="counts what the CPU's build asks for")


def test_merge_reads_few_bytes_for_each_entry() -> None:
    plan = plan_product(*pruned_convolutions(), method="merge")
    entries, pairs = plan.pattern.nnz, plan.flop / 2 / plan.pattern.nnz
    traffic = traffic_of(plan)
    assert 1.4 < pairs < 1.7 and traffic.nbytes <= 20 * entries
    assert traffic.read["left"] == traffic.read["right"] == plan.flop // 2
    assert traffic.read["starts"] == 2 * entries and traffic.written["c"] == 4 * entries
    # Four entries a thread.
    assert traffic.threads <= entries / 4 + 64


@pytest.mark.parametrize("batch", [2, 3, 7, 16, 17, 32, 70])
def test_no_batch_takes_more_bytes_for_each_sample(batch: int) -> None:
    plan = plan_product(*pruned_convolutions(channels=8, kept=0.2), method="merge")
    one, own, shared = traffic_of(plan), traffic_of(plan, batch), traffic_of(plan, batch, shared=True)
    assert shared.nbytes <= batch * one.nbytes
    # Where each sample has its own, A's values are read for each pair, and not once for a block.
    assert own.nbytes - own.read["a"] <= batch * (one.nbytes - one.read["a"])
    assert own.read["a"] == batch * 2 * plan.flop and own.threads <= batch * plan.pattern.nnz


@pytest.mark.parametrize("batch", [1, 3, 32])
@pytest.mark.parametrize("left", [True, False])
def test_a_selection_has_few_threads(left: bool, batch: int) -> None:
    plan = plan_product(*pooling(left), method="select")
    traffic = traffic_of(plan, batch)
    assert traffic.threads <= plan.pattern.nnz * batch
    # What does not win is not read.
    assert traffic.read["b" if left else "a"] < 4 * plan.flop / 2 * batch
