"""Cells, their numbers of calls, and the limits that belong to them."""

import pytest
from versus import limits, plan
from versus.plan import Cell, Job, cells, read_job, schedule


def planned(operations, sizes, ranks=2, itemsize=4, cores=2):
    return list(cells(operations, sizes, itemsize, ranks, cores, 1.0))


def test_sizes_are_whole_elements_or_whole_parts_of_them():
    assert [(c.size, c.count) for c in planned(["all_reduce"], [8, 10, 12], ranks=4)] == [(8, 2), (12, 3)]
    assert [(c.size, c.count) for c in planned(["all_gather"], [8, 16, 17], ranks=4)] == [(16, 4), (32, 8)]
    assert [(c.operation, c.size) for c in planned(["barrier"], [8, 16])] == [("barrier", 0)]


def test_fewer_calls_for_larger_arrays_and_where_ranks_share_cores():
    assert schedule(8, 1.0) == schedule(0, 1.0) == (30, 40)
    assert schedule(1 << 20, 1.0) == schedule(64 << 20, 1.0) == (30, 1)
    assert (schedule(8, 0.01), schedule(8, 4.0)) == ((3, 40), (120, 40))
    assert schedule(8, 1.0, crowding=4.0) == (30, 10)
    assert planned(["barrier"], [], ranks=8)[0].calls < planned(["barrier"], [], ranks=2)[0].calls


def test_every_operation_but_the_barrier_has_a_limit():
    assert set(limits.LIMITS_OF) == set(plan.OPERATIONS) - {"barrier"}
    assert {limit for found in limits.LIMITS_OF.values() for limit in found} == set(plan.LIMITS)


def test_a_limit_is_measured_once_for_all_operations_and_in_their_sizes():
    found = limits.limit_cells(planned(["all_reduce", "reduce", "scatter", "barrier"], [8, 100], ranks=3))
    assert [(c.operation, c.size, c.count) for c in found] == [
        ("stream", 8, 2),
        ("stream", 100, 25),
        ("copy_part", 12, 3),
        ("copy_part_past", 12, 3),
        ("copy_part", 108, 27),
        ("copy_part_past", 108, 27),
    ]


@pytest.mark.parametrize("cores", [(0, 1), ()])
def test_a_job_survives_its_file(tmp_path, cores):
    job = Job((Cell("all_reduce", 2, 8, 25, 40),), 2, "float32", cores, 1.0, 5.0)
    job.write(tmp_path)
    assert read_job(tmp_path) == job
