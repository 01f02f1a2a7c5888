"""The aims that a report misses."""

import json

import pytest
from versus import targets
from versus.targets import Missed, kind, missed

M = 1 << 20


def report(*rows, kind="versus", backend="auto", ranks=2, hosts=1):
    """Return a report of `(operation, size, values)`; values by the names of targets.VALUES."""
    results = [
        {"operation": operation, "size": size}
        | {targets.VALUES[name]: value for name, value in values.items()}
        for operation, size, values in rows
    ]
    machine = {"usable_cores": 2}
    return {
        "kind": kind, "backend": backend, "ranks": ranks, "hosts": hosts, "machine": machine, "command": "c",
        "results": results,
    }  # fmt: skip


def test_no_aim_is_missed_if_all_are_reached():
    values = {"MPI": 3.0, "p99": 1.0, "copy": 1.2, "Gloo": 2.0}
    assert missed(report(("broadcast", 8, values), ("broadcast", M, values), ("all_reduce", M, values))) == []


def test_of_several_aims_of_a_value_the_hardest_is_reported():
    found = missed(
        report(("all_reduce", M, {"MPI": 0.9}), ("broadcast", 8, {"MPI": 1.2}), ("gather", 8, {"MPI": 9}))
    )
    assert Missed("all_reduce", M, "MPI", 0.9, 1.4) in found
    assert Missed("broadcast", 8, "MPI", 1.2, 1.3) in found
    assert [one for one in found if one.operation == "gather"] == []


def test_means_are_geometric_and_of_the_cells_that_the_aim_is_about():
    rows = [
        ("all_reduce", 8, {"MPI": 90.0}),
        ("all_reduce", M, {"MPI": 1.5}),
        ("reduce_scatter", M, {"MPI": 1.5}),
    ]
    assert missed(report(*rows)) == [
        Missed("all_reduce, reduce_scatter", None, "MPI", pytest.approx(1.5), 2.0)
    ]


def test_the_kind_of_a_report():
    assert kind(report()) == kind(report(backend="shm")) == "shm"
    assert kind(report(ranks=4)) == "shm, crowded"
    assert kind(report(backend="tcp")) == "tcp"
    assert kind(report(ranks=4, hosts=2)) == "hosts"
    assert kind(report(kind="torch")) == "torch"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (report(("all_reduce", 8, {"MPI": 1.9}), ranks=4), 2.0),
        (report(("broadcast", 8, {"MPI": 0.9}), backend="tcp"), 1.0),
        (report(("broadcast", 4 * M, {"MPI": 1.4}), backend="tcp"), 1.5),
        (report(("broadcast", M, {"Gloo": 1.9}), backend="tcp"), 2.0),
        (report(("all_reduce", 8, {"Gloo": 29}), kind="torch"), 30.0),
        (report(("all_reduce", 64 * M, {"Gloo": 5}), kind="torch"), 6.0),
        (report(("mlp, batch 32", 0, {"Gloo": 1.2}), kind="ddp"), 1.3),
        (report(("barrier", 0, {"p99": 0.99})), 1.0),
        (
            report(*(("scatter", size, {"copy": 1.3}) for size in (1 << 15, 1 << 18, 64 * M))),
            1.2,
        ),  # an upper bound
        (report(("gather", 8, {"first": 1.4}), kind="first calls"), 1.3),
        (report(("update_shared_all_reduce", M, {"own": 1.7}), ranks=2), 1.8),
        (report(("update_shared_all_reduce", M, {"MPI": 2.9}), ranks=2), 3.0),
    ],
)
def test_each_kind_has_its_aims(found, expected):
    assert [one.aim for one in missed(found)] == [expected]


def test_as_a_table(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(report(("barrier", 0, {"MPI": 0.5}), ("scatter", M, {"copy": 1.25}))))
    assert targets.main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "| barrier | MPI | 0.50 | ≥ 1.3 |",
        "| scatter of 1M | copy | 1.25 | ≤ 1.2 |",
    ]
