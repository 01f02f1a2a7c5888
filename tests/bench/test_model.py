"""The cost model finds prices that it was given, and says of clusters what must be so."""

import itertools

import numpy as np
import pytest
from network_model import (
    PRICES,
    Cluster,
    Model,
    Sample,
    accuracy,
    algorithm_cost,
    by_nodes,
    features,
    fit,
    flat,
    header_seconds,
)

OPERATIONS = ("all_reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "all_to_all")
SIZES = (12, 3 << 10, 48 << 10, 192 << 10, 768 << 10, 3 << 20, 12 << 20, 48 << 20)
TRUE = Model(
    dict(zip(PRICES, (8e-6, 2e-6, 1.5e-10, 6e-11, 3e-11, 2e-11, 5e-6), strict=True)),
    {name: (2 + k) * 1e-6 for k, name in enumerate(OPERATIONS)},
)


def samples(noise=0.0, worlds=(1, 2, 3, 4), cores=2, sizes=SIZES):
    chance = np.random.default_rng(5)
    cells = itertools.product(OPERATIONS, worlds, sizes)
    found = [Sample(name, ranks, size, 1.0, min(ranks, cores)) for name, ranks, size in cells]
    times = [TRUE.seconds(s) * float(np.exp(noise * chance.standard_normal())) for s in found]
    return [s._replace(seconds=time) for s, time in zip(found, times, strict=True)]


def test_exact_times_give_exact_predictions():
    model = fit(samples())
    assert accuracy(model, samples()).worst < 0.01
    for name in ("step", "message", "touch", "wake"):
        assert model.prices[name] == pytest.approx(TRUE.prices[name], rel=0.1)


def test_noisy_times_give_predictions_as_good_as_the_times():
    model = fit(samples(noise=0.15))
    assert accuracy(model, samples(noise=0.15)).median < 0.15
    assert accuracy(model, samples()).median < 0.05


def test_worlds_and_sizes_that_were_not_measured_are_predicted():
    model = fit(samples(worlds=(1, 2, 4), sizes=SIZES[::2]))
    assert accuracy(model, samples(worlds=(3,), sizes=SIZES[1::2])).worst < 0.05


def test_accuracy_counts_what_is_off():
    times = samples()
    wrong = [s._replace(seconds=s.seconds * (2 if k == 0 else 1)) for k, s in enumerate(times)]
    found = accuracy(TRUE, wrong)
    assert found.worst == pytest.approx(0.5)
    assert found.within == pytest.approx(1 - 1 / len(times))
    assert found.median == pytest.approx(0, abs=1e-12)


def test_too_few_times_are_refused():
    with pytest.raises(ValueError, match="3 samples cannot give 8 numbers"):
        fit(samples()[:3])


def test_more_ranks_on_the_same_cores_take_longer():
    alone, crowded = (TRUE.seconds(Sample("all_reduce", 4, 1 << 20, 1.0, cores)) for cores in (None, 2))
    assert crowded > 1.8 * alone


@pytest.mark.parametrize("nbytes", [8, 64 << 10, 16 << 20])
def test_more_nodes_and_bytes_take_longer(nbytes):
    times = [flat(TRUE, Cluster(nodes), "ring", "all_reduce", nbytes) for nodes in (4, 64, 1024)]
    assert times == sorted(times)
    assert flat(TRUE, Cluster(64), "ring", "all_reduce", 2 * nbytes) > times[1]


def test_a_cluster_is_as_fast_as_its_cards():
    slow, fast = (flat(TRUE, Cluster(8, bandwidth=b), "circulant", "all_reduce", 1 << 30) for b in (1e8, 1e9))
    assert slow == pytest.approx(2 * 7 / 8 * (1 << 30) / 1e8, rel=0.05)
    assert fast < slow / 5


def test_nodes_with_several_ranks_gain_from_shared_memory():
    cluster = Cluster(nodes=32, per_node=8)
    for nbytes in (1 << 20, 64 << 20):
        assert by_nodes(TRUE, cluster, nbytes) < flat(TRUE, cluster, "circulant", "all_reduce", nbytes)


def test_the_headers_of_many_ranks_weigh_as_much_as_there_are_ranks():
    """Every rank gets every header."""
    one, two = (header_seconds(TRUE, Cluster(nodes)) for nodes in (2048, 4096))
    assert two == pytest.approx(2 * one, rel=0.01)


def test_features_of_a_rank_by_itself_are_its_copies():
    assert list(features("all_reduce", 1, 4096)) == [0] * len(PRICES)
    assert features("all_gather", 1, 4096)[PRICES.index("touch")] == 4096
    assert algorithm_cost("nothing", "all_reduce", 4, 0).wire == 0
