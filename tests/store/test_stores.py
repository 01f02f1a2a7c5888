"""The contract of Store, on every store of the package and on a user-defined one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rendezvous.observed import FourOperations

import fastcoll
from fastcoll.errors import StoreError, StoreTimeoutError, UnavailableError, UsageError
from fastcoll.store import FileStore, HashStore, PrefixStore, Store, TCPStore, imported
from fastcoll.store.store import StalledError, tries
from fastcoll.store.table import MAX_KEY, MAX_VALUE

KINDS = ("hash", "file", "tcp", "prefix")


@pytest.fixture(params=(*KINDS, "user"))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with make(request.param, tmp_path) as made:
        yield made


@pytest.fixture(params=KINDS)
def full_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with make(request.param, tmp_path) as made:
        yield made


def make(kind: str, tmp_path: Path) -> Store:
    match kind:
        case "hash":
            return HashStore()
        case "file":
            return FileStore(tmp_path / "store")
        case "tcp":
            return TCPStore("127.0.0.1", 0, is_master=True)
        case "prefix":
            return PrefixStore("a/b", HashStore())
    return FourOperations()


def test_set_and_get(store: Store) -> None:
    store.set("text", "grün")
    store.set("bytes", b"\0\xff" * 1000)
    store.set("empty", b"")
    assert store.get("text") == "grün".encode()
    assert store.get("bytes") == b"\0\xff" * 1000
    assert store.get("empty") == b""
    store.set("text", "new")
    assert store.get("text") == b"new"


def test_add_counts_in_decimal_text(store: Store) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.add("n", 0) == -2
    assert store.get("n") == b"-2"
    store.set("n", "40")
    assert store.add("n", 2) == 42


@pytest.mark.parametrize("method", ["wait", "fetch", "multi_get"])
def test_a_wait_ends_with_the_last_key(store: Store, method: str) -> None:
    store.set("a", "1")
    setter = threading.Timer(0.05, store.set, ("b", ""))
    setter.start()
    found = getattr(store, method)(["b", "a"])
    assert store.check(["a", "b"])
    assert found == (None if method == "wait" else [b"", b"1"])
    setter.join()


def test_a_polling_loop_runs_at_once_and_at_its_limit(clock, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(clock, "sleep", lambda seconds: now.append(now.pop() + seconds))
    looks = [now[0] for _ in tries(0.1)]
    assert (looks[0], looks[-1]) == (0.0, pytest.approx(0.1))
    assert len(looks) > 5


def test_more_keys_than_fit_in_one_request(store: Store) -> None:
    keys = [f"key{i}" for i in range(2500)]
    values = [key.encode() for key in keys]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == store.fetch(keys, 50) == values
    assert store.peek([*keys, "more"]) == [*values, None]
    assert store.check(keys)
    store.wait(keys)
    assert not store.check([*keys, "more"])


def test_values_as_large_as_they_may_be(full_store: Store) -> None:
    large = [letter * MAX_VALUE for letter in (b"x", b"y", b"z")]
    full_store.multi_set(["x", "y", "z"], large)
    for read in (full_store.multi_get, full_store.fetch, full_store.peek):
        assert read(["x", "y", "z"]) == large
    with pytest.raises(UsageError, match=f"at most {MAX_VALUE}"):
        full_store.set("x", large[0] + b"1")
    with pytest.raises(StoreError, match=r"'.*x' has 8388609 bytes"):
        full_store.append("x", b"1")
    assert full_store.get("x") == large[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.set("k" * (MAX_KEY + 1), "1"), "key has at most"),
        (lambda s: s.set(b"key", "1"), "key is text"),
        (lambda s: s.set("key", 1), "value is text or bytes, got int"),
        (lambda s: s.get(b"key"), "key is text, got bytes"),
        (lambda s: s.delete_key(5), "key is text, got int"),
        (lambda s: s.set("\udcff", "1"), "key is text that UTF-8 can encode"),
        (lambda s: s.set("key", "\udcff"), "value is text that UTF-8 can encode"),
        (lambda s: s.check(["a", "\udcff"]), "key is text that UTF-8 can encode"),
        (lambda s: s.add("n", 1.7), "amount is 1.7, a float"),
        (lambda s: s.add("n", 10**30), "amount is 10{30}; a store's numbers have 64 bits"),
        (lambda s: s.multi_set(["a", "b"], ["1"]), "2 keys and 1 values"),
        (lambda s: s.multi_set("ab", ["1", "2"]), "keys is a list of keys"),
        (lambda s: s.multi_set(["a", "b"], "12"), "values is a list of values"),
        (lambda s: s.multi_set(["a", "b"], ["1", 2]), "value is text or bytes, got int"),
        (lambda s: s.multi_set(["a", 5], ["1", "2"]), "key is text, got int"),
        (lambda s: s.compare_set("a", None, "b"), "value is text or bytes"),
    ],
)
def test_misuse_is_refused(call, message: str, full_store: Store) -> None:
    with pytest.raises(UsageError, match=message):
        call(full_store)
    assert full_store.num_keys() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.barrier("b", 0), "world_size is 0; a barrier needs at least one process"),
        (lambda s: PrefixStore("a", {}), r"store is dict; give a fastcoll\.Store .* or a store of torch"),
        (lambda s: s.wait("key"), r"write \['key'\]"),
        (lambda s: s.peek(b"key"), r"write \[b'key'\]"),
        (lambda s: s.wait(5), "keys is a list of keys, got int 5"),
        (lambda s: s.wait(["a", 5]), "key is text, got int 5"),
        (lambda s: s.wait(["key"], -1), "timeout is 0 to"),
        (lambda s: s.wait(["key"], "3"), "timeout is '3'"),
        (lambda s: s.set_timeout(float("nan")), "timeout is nan"),
        (lambda s: s.set_timeout(float("inf")), "timeout is 0 to"),
    ],
)
def test_wrong_lists_of_keys_and_timeouts_are_refused(call, message: str, store: Store) -> None:
    with pytest.raises(UsageError, match=message):
        call(store)


def test_compare_set_as_in_torch(full_store: Store) -> None:
    assert full_store.compare_set("k", "first", "second") == b"first"
    assert not full_store.check(["k"])
    assert full_store.compare_set("k", "", "first") == b"first"
    assert full_store.compare_set("k", "wrong", "second") == b"first"
    assert full_store.compare_set("k", "", "second") == b"first"
    assert full_store.compare_set(key="k", expected_value="first", desired_value="second") == b"second"
    assert full_store.get("k") == b"second"


def test_set_new_sets_only_keys_that_are_not_set(store: Store) -> None:
    assert store.set_new(["a", "b"], ["1", b""]) == [None, None]
    assert store.set_new(["b", "c"], ["2", "3"]) == [b"", None]
    assert store.set_new(["c"], ["3"]) == [b"3"]
    assert store.multi_get(["a", "b", "c"]) == [b"1", b"", b"3"]


def test_of_threads_that_set_a_new_key_one_sets_it(store: Store, in_threads) -> None:
    values = [b"%d" % number for number in range(8)]
    found = in_threads(*(partial(store.set_new, ["k"], [value]) for value in values))
    winner = store.get("k")
    assert found == [[None if value == winner else winner] for value in values]


def test_an_exchange_sets_a_key_and_waits_for_another(store: Store, in_threads) -> None:
    assert in_threads(
        partial(store.exchange, "a", b"1", "b", 60), partial(store.exchange, "b", b"2", "a", timedelta(60))
    ) == [b"2", b"1"]
    with pytest.raises(StoreTimeoutError, match=r"'.*d' was not set in the store within 0\.01 s"):
        store.exchange("c", b"3", "d", 0.01)
    assert store.get("c") == b"3"


def test_compare_set_takes_two_values_of_the_largest_size(full_store: Store) -> None:
    key, old, new = "k" * (MAX_KEY - 100), b"1" * MAX_VALUE, b"2" * MAX_VALUE
    full_store.set(key, old)
    with full_store.clone() as other:
        assert full_store.compare_set(key, old, new) == new
        assert other.get(key) == new


def test_append_delete_and_count(full_store: Store) -> None:
    full_store.append("log", "a")
    full_store.append("log", b"bc")
    assert full_store.get("log") == b"abc"
    full_store.set("other", "1")
    assert full_store.num_keys() == 2
    assert full_store.delete_key("log")
    assert not full_store.delete_key("log")
    assert full_store.num_keys() == 1


def test_add_to_a_value_that_is_not_a_number(full_store: Store) -> None:
    for value in ("abc", "", "1.5", "1" * 30, "--1", "٣"):
        full_store.set("k", value)
        with pytest.raises(StoreError, match="not an integer"):
            full_store.add("k", 1)
        assert full_store.get("k") == value.encode()
    full_store.set("k", str(2**63 - 1))
    with pytest.raises(StoreError, match="64 bits"):
        full_store.add("k", 1)


def test_threads_share_a_store(full_store: Store, in_threads) -> None:
    def work() -> None:
        for _ in range(100):
            full_store.add("n", 1)
        if full_store.add("done", 1) == 3:
            full_store.set("late", "yes")

    def wait() -> bytes:
        return full_store.get("late")

    assert in_threads(wait, work, work, wait, work) == [b"yes", None, None, b"yes", None]
    assert full_store.add("n", 0) == 300


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_forked_child_is_refused_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path) as store:
        store.set("k", "v")
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                store.get("k")
            except UsageError as error:
                os.write(write, str(error).encode())
            store.close()
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        with open(read, encoding="utf-8") as pipe:
            assert f"belongs to process {os.getpid()} and came here by a fork" in pipe.read()
        assert store.get("k") == b"v"
        with store.clone() as another:
            assert another.get("k") == b"v"


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_closed_means_closed(kind: str, tmp_path: Path, in_threads) -> None:
    store, waiting = make(kind, tmp_path), threading.Event()

    def get() -> bytes:
        waiting.set()
        return store.get("never")

    def close() -> None:
        waiting.wait()
        store.close()
        store.close()

    error, _ = in_threads(get, close)
    with pytest.raises(StoreError, match="closed"):
        store.set("a", "1")
    assert (type(error), "closed" in str(error)) == (StoreError, True)


def test_a_users_store_names_missing_methods_and_keeps_retired_keys() -> None:
    store = FourOperations()
    missing = {"compare_set": "abc", "append": "ab", "delete_key": "a", "num_keys": "", "list_keys": ""}
    for name, args in (
        missing | {"queue_push": "ab", "queue_pop": "a", "queue_len": "a", "clone": ""}
    ).items():
        with pytest.raises(UnavailableError, match=rf"FourOperations has no {name}; override Store\.{name}"):
            getattr(store, name)(*args)
    assert not store.has_extended_api()
    store.set("g/a", "")
    assert not store.retire("g/", 1)
    assert store.check(["g/a"])
    with pytest.raises(TypeError, match="abstract"):
        Store()


def test_prefixes_nest_and_separate_keys() -> None:
    with HashStore() as base:
        one, two = PrefixStore("one", base), PrefixStore("two", PrefixStore("deep", base))
        one.set("k", "1")
        two.set("k", "2")
        assert base.check(["one/k", "deep/two/k"])
        one.close()
        assert (base.num_keys(), one.get("k"), two.get("k")) == (2, b"1", b"2")
        assert one.delete_key("k")
        assert one.num_keys() == 1


def test_keys_are_removed_when_all_users_have_retired_them(full_store: Store) -> None:
    keys = ["g", "g1", "g1/a", "g1/b/c", "g10/a", "h"]
    full_store.multi_set(keys, [""] * len(keys))
    assert [full_store.retire("g1/", 3) for _ in range(3)] == [False, False, True]
    assert sorted(full_store.list_keys()) == ["g", "g1", "g10/a", "h"]
    assert full_store.num_keys() == 4
    assert full_store.retire("g1/", 1)  # nothing else
    assert full_store.num_keys() == 4


@pytest.mark.parametrize("count", [1, 2, 16, 17, 2100])
def test_a_timeout_names_all_missing_keys(store: Store, count: int) -> None:
    """Up to 16 of them, even if keys between them are set, and the keys need several requests."""
    keys = [f"key{number}" for number in range(count)]
    store.multi_set(["here", "there"], ["", ""])
    store.set_timeout(timedelta(seconds=0.05))
    assert store.timeout == timedelta(seconds=0.05)
    named = ", ".join(map(repr, keys[:16])) + (f" and {count - 16} more" if count > 16 else "")
    for ask in (store.wait, store.fetch, store.multi_get):
        for limit, said in ([(), "0.05"], [(0.01,), "0.01"], [(timedelta(0),), "0"]):
            if limit and ask == store.multi_get:  # it has no timeout of its own
                continue
            with pytest.raises(StoreTimeoutError) as caught:
                ask(["here", *keys, "there"], *limit)
            text = str(caught.value).replace("'a/b/", "'")
            verb = "was" if count == 1 else "were"
            assert text == f"timed out: {named} {verb} not set in the store within {said} s"
    store.set("key0", "back")
    assert store.get("key0") == b"back"


def test_peek_and_check_never_wait(store: Store) -> None:
    store.set("empty", b"")
    store.set("full", b"=1")
    assert store.peek(["full", "missing", "empty"]) == [b"=1", None, b""]
    assert store.peek([]) == []
    assert store.check([])
    assert store.check(["full"])
    assert not store.check(["full", "missing"])


# ---- further methods of torch's stores, in both libraries ------------------------------------------------


@pytest.fixture(params=(*KINDS, "adapted", "torch"))
def like_torch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Each store of fastcoll, a view of torch's, and torch's itself; the tests hold for all of them."""
    if request.param in KINDS:
        with make(request.param, tmp_path) as made:
            yield made
        return
    store = pytest.importorskip("torch.distributed").HashStore()
    yield imported(store) if request.param == "adapted" else store


def test_queues(like_torch: Any) -> None:
    like_torch.set_timeout(timedelta(seconds=0.05))
    assert like_torch.queue_len("q") == 0
    for value in ("one", b"\xfftwo", ""):
        like_torch.queue_push("q", value)
    assert like_torch.queue_len("q") == 3
    like_torch.wait(["q"])
    assert like_torch.check(["q"])
    popped = [like_torch.queue_pop("q", *block) for block in ((), (False,), (True,))]
    assert popped == [b"one", b"\xfftwo", b""]
    assert like_torch.queue_len("q") == 0
    assert not like_torch.check(["q"])
    with pytest.raises(RuntimeError, match="empty") as empty:
        like_torch.queue_pop("q", False)
    assert type(empty.value).__name__ == "QueueEmptyError"
    with pytest.raises(RuntimeError, match=r"timeout|within 0\.05 s"):
        like_torch.queue_pop("q")


def test_keys_are_listed(like_torch: Any) -> None:
    assert like_torch.list_keys() == []
    names = ["", *sorted(f"key{number}" for number in range(1500))]
    like_torch.multi_set(names, names)
    like_torch.delete_key("key7")
    assert sorted(like_torch.list_keys()) == sorted({*names} - {"key7"})
    assert like_torch.has_extended_api()


def test_a_clone_has_the_same_keys(like_torch: Any) -> None:
    other = like_torch.clone()
    other.set("k", "v")
    assert like_torch.get("k") == b"v"
    like_torch.queue_push("q", "1")
    assert other.queue_pop("q") == b"1"
    if isinstance(other, Store):
        assert type(other) is type(like_torch)
        assert other.timeout == like_torch.timeout
        other.close()
        assert like_torch.get("k") == b"v"


def test_a_barrier(like_torch: Any, in_threads) -> None:
    like_torch.barrier("one", 1)
    like_torch.barrier(key="one more", world_size=1, timeout=timedelta(minutes=5))
    with pytest.raises(
        RuntimeError, match=r"[Tt]imeout|1 of 2 processes came to the barrier 'two' within 0\.05 s"
    ):
        like_torch.barrier("two", 2, timedelta(seconds=0.05))
    assert in_threads(*[lambda: like_torch.barrier("three", 3, timedelta(minutes=5))] * 3) == [None] * 3
    like_torch.barrier("three", 3)


def test_each_value_of_a_queue_goes_to_one_waiter(full_store: Store, in_threads) -> None:
    def take() -> list[bytes]:
        return [full_store.queue_pop("q") for _ in range(20)]

    def give(name: str) -> list[bytes]:
        for number in range(20):
            full_store.queue_push("q", f"{name} {number}")
        return [f"{name} {number}".encode() for number in range(20)]

    *taken, one, two = in_threads(take, take, lambda: give("one"), lambda: give("two"))
    assert sorted(taken[0] + taken[1]) == sorted(one + two)
    for values in taken:
        for giver in (one, two):
            mine = [value for value in values if value in giver]
            assert mine == sorted(mine, key=giver.index)


def test_a_key_that_is_not_a_queue_is_not_changed(full_store: Store) -> None:
    for value in ("", "abc", b"\0ITM\0\0\0\xff1"):
        full_store.set("k", value)
        for take in (full_store.queue_pop, full_store.queue_len):
            with pytest.raises(StoreError, match="not a queue"):
                take("k")
        assert full_store.get("k") == (value.encode() if isinstance(value, str) else value)
    for value in ("", "42"):
        full_store.set("k", value)
        with pytest.raises(StoreError, match=f"k' holds b'{value}', which is not a queue"):
            full_store.queue_push("k", "item")
        assert full_store.get("k") == value.encode()
    full_store.queue_push("items", "one")
    with pytest.raises(StoreError, match="items' is a queue; add to it with queue_push"):
        full_store.append("items", "two")
    assert full_store.queue_pop("items") == b"one"
    full_store.queue_push("q", bytes(MAX_VALUE - 1000))
    with pytest.raises(StoreError, match="at most"):
        full_store.queue_push("q", bytes(1000))
    assert full_store.queue_len("q") == 1


def test_a_store_that_does_not_answer_is_not_called_an_empty_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(request: object) -> None:
        raise StalledError("the store does not answer")

    store = HashStore()
    monkeypatch.setattr(store, "_ask", stalled)
    with pytest.raises(StalledError, match="does not answer"):
        store.queue_pop("q", block=False)


def test_every_method_of_torchs_stores_exists() -> None:
    theirs = pytest.importorskip("torch.distributed")
    for ours in (Store, TCPStore, FileStore, HashStore, PrefixStore):
        names = {name for name in dir(getattr(theirs, ours.__name__)) if not name.startswith("_")}
        there = set(dir(ours)) | {"host", "port", "path", "underlying_store"}  # set by __init__
        assert names - there == set()


def test_a_world_in_a_store_of_torch() -> None:
    store = pytest.importorskip("torch.distributed").HashStore()
    for shared in (store, PrefixStore("mine", store), store):
        fastcoll.init_process_group(store=shared, rank=0, world_size=1)
        assert fastcoll.get_world_size() == 1
        fastcoll.destroy_process_group()
    assert any(key.startswith("mine/fastcoll/") for key in store.list_keys())
