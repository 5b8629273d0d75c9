import math

import pytest

from pretrain.metrics.hardware import device_named
from pretrain.plan.network import Network

H100 = device_named("h100-sxm")


def network(**changes) -> Network:
    ideal = Network(H100, "infiniband", gpus_per_node=8, link_share=1.0, card_share=1.0, hop_seconds=0.0)
    return ideal._replace(**changes)


def test_one_rank_sends_nothing():
    assert network(hop_seconds=1.0).seconds("all_reduce", 1e9, ranks=1, stride=1) == 0


def test_a_gather_inside_a_node_moves_all_but_its_own_share_over_the_links():
    assert network().seconds("all_gather", 8e9, ranks=8, stride=1) == pytest.approx(7e9 / 450e9)


def test_an_all_reduce_is_a_scatter_and_a_gather():
    one = network().seconds("reduce_scatter", 8e9, ranks=8, stride=1)
    assert network().seconds("all_reduce", 8e9, ranks=8, stride=1) == pytest.approx(2 * one)


def test_a_group_of_one_rank_a_node_has_only_its_own_card():
    """Ranks 8 apart (tensor parallel 8 inside): 50 GB/s each; eight neighbours on a node share eight cards."""
    apart = network().seconds("all_gather", 4e9, ranks=4, stride=8)
    together = network().seconds("all_gather", 4e9, ranks=32, stride=1)
    assert apart == pytest.approx(3 / 4 * 4e9 / 50e9)
    assert together == pytest.approx(31 / 32 * 4e9 / 400e9)


@pytest.mark.parametrize(("nodes", "gbs"), [(2, 185), (8, 69), (64, 11)])
def test_efa_has_its_measured_bandwidth_at_each_number_of_nodes(nodes, gbs):
    ranks = 8 * nodes
    seconds = network(fabric="efa").seconds("all_gather", 1e9, ranks=ranks, stride=1)
    assert seconds == pytest.approx((ranks - 1) / ranks * 1e9 / (gbs * 1e9))


def test_bandwidth_between_measured_numbers_of_nodes_lies_between_theirs():
    times = [network(fabric="efa").seconds("all_gather", 1e9, ranks=8 * n, stride=1) for n in range(1, 65)]
    assert times == sorted(times)


def test_latency_grows_with_every_doubling_of_nodes_and_is_less_on_infiniband():
    efa = network(fabric="efa", hop_seconds=1e-3)
    assert efa.seconds("all_gather", 0.0, ranks=64, stride=1) == pytest.approx(math.log2(8) * 1e-3)
    assert network(hop_seconds=1e-3).seconds("all_gather", 0.0, ranks=64, stride=1) == pytest.approx(0.75e-3)
    assert efa.seconds("all_gather", 0.0, ranks=8, stride=1) == 0
