"""The object store, on a folder and on a real S3 server."""

import threading

import pytest

from areal_pipe.contract.errors import ConcurrentWrite, StorageError
from areal_pipe.storage.objects import ObjectStore, open_store
from tests.services import BUCKET, S3Server


def test_what_was_put_is_got_back(store: ObjectStore) -> None:
    store.put("a/b/c.bin", b"\x00content")
    assert store.get("a/b/c.bin") == b"\x00content"


def test_a_missing_object_is_none(store: ObjectStore) -> None:
    assert store.get("nothing/here") is None


def test_put_replaces(store: ObjectStore) -> None:
    store.put("k", b"old")
    store.put("k", b"new")
    assert store.get("k") == b"new"


def test_create_refuses_a_taken_key_and_keeps_its_content(store: ObjectStore) -> None:
    assert store.create("k", b"first")
    assert not store.create("k", b"second")
    assert store.get("k") == b"first"


def test_one_of_many_racing_creators_wins(store: ObjectStore) -> None:
    wins: list[int] = []

    def race(i: int) -> None:
        if store.create("race", f"writer {i}".encode()):
            wins.append(i)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert store.get("race") == f"writer {wins[0]}".encode()


def test_swap_creates_where_nothing_is(store: ObjectStore) -> None:
    tag = store.swap("m", b"1", tag=None)
    found = store.get_tagged("m")
    assert found is not None
    assert (found.data, found.tag) == (b"1", tag)


def test_swap_refuses_a_state_it_does_not_know(store: ObjectStore) -> None:
    tag = store.swap("m", b"1", tag=None)
    store.swap("m", b"2", tag=tag)
    with pytest.raises(ConcurrentWrite, match="changed by another run"):
        store.swap("m", b"3", tag=tag)
    with pytest.raises(ConcurrentWrite):
        store.swap("m", b"3", tag=None)
    assert store.get("m") == b"2"


def test_list_shows_what_was_just_written_and_deleted(store: ObjectStore) -> None:
    store.put("p/1", b"")
    store.put_many({"p/2": b"x", "p/q/3": b"y", "other": b"z"})
    assert store.list("p") == ["p/1", "p/2", "p/q/3"]
    store.delete(["p/1", "p/q/3", "p/never-was"])
    assert store.list("p") == ["p/2"]


def test_an_opened_object_can_be_read_in_the_middle(store: ObjectStore) -> None:
    store.put("f", b"0123456789")
    with store.open("f") as file:
        file.seek(4)
        assert file.read(3) == b"456"


@pytest.mark.s3
def test_a_wrong_secret_is_refused_without_being_shown(s3: S3Server) -> None:
    options = s3.options | {"secret": "sk-wrong-secret"}
    store = open_store(f"s3://{BUCKET}/x", options)
    with pytest.raises(StorageError, match="refused") as caught:
        store.put("k", b"")
    assert "sk-wrong-secret" not in str(caught.value)


@pytest.mark.s3
def test_a_missing_bucket_is_named(s3: S3Server) -> None:
    store = open_store("s3://no-such-bucket/x", s3.options)
    with pytest.raises(StorageError, match="no-such-bucket"):
        store.get("k")


def test_a_place_that_cannot_be_written_is_named() -> None:
    store = open_store("/proc/areal-pipe")
    with pytest.raises(StorageError, match="/proc/areal-pipe"):
        store.put("k", b"")
