"""Storage on local disk and on a real S3-compatible server: whole or absent, first or lost, errors by name."""

from __future__ import annotations

import errno
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from fork_server import Call, ForkServer
from pyarrow import fs

from raycl.errors import AlreadyExistsError, DamagedError, StorageError
from raycl.storage import Storage
from raycl.storage.numbered import NumberedRecords
from raycl.storage.unfinished import finished_beside

BUCKET = "bucket"
WRITERS, RACING = 8, 3


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Return an empty folder on either side."""
    if request.param == "local":
        return Storage.at(tmp_path / "deep" / "store")
    return Storage.at(request.getfixturevalue("s3_uri")(f"{tmp_path.name}/store"))


def test_what_is_written_is_read_listed_and_replaced(store: Storage) -> None:
    assert not store.exists()
    assert store.list() == []
    store.write("b/two", b"22")
    store.write("b/one", b"1")
    store.write("a", b"")
    assert store.list() == ["a", "b"]
    assert store.list("b") == ["one", "two"]
    assert store.folders() == [store.sub("b")] and store.folders("nothing") == []
    assert store.list("nothing") == []
    assert store.exists("b/one")
    assert store.exists("b")
    assert not store.exists("b/three")
    assert (store.read("a"), store.read("b/two")) == (b"", b"22")
    store.write("b/two", b"2")
    assert store.read("b/two") == b"2"


def test_streams_are_seekable(store: Storage) -> None:
    store.write("data", bytes(range(256)))
    with store.open("data") as stream:
        stream.seek(250)
        assert stream.read(3) == bytes([250, 251, 252])


def test_a_sub_folder_is_the_same_place(store: Storage) -> None:
    sub = store.sub("runs").sub("one")
    sub.write_json("manifest.json", {"läuft": [1, 2.5, None]})
    assert store.read_json("runs/one/manifest.json") == {"läuft": [1, 2.5, None]}
    assert sub.uri == f"{store.uri}/runs/one"
    sub.create("claim", b"mine")
    with pytest.raises(AlreadyExistsError):
        store.create("runs/one/claim", b"too late")


def test_a_storage_travels_to_other_processes(store: Storage) -> None:
    store.write("data", b"here")
    again: Storage = pickle.loads(pickle.dumps(store))
    assert again.read("data") == b"here"
    assert again == store
    assert Storage.at(store.address) == store
    assert Storage.at(store.sub("folder").address) == store.sub("folder")


def test_delete_takes_files_and_folders_and_ignores_the_absent(store: Storage) -> None:
    store.write("folder/deep/file", b"1")
    store.write("file", b"1")
    store.write("other", b"1")
    store.delete("file")
    store.delete("folder")
    store.delete("folder")
    store.delete("never")
    assert not store.exists("folder")
    assert store.list() == ["other"]


def test_create_is_exclusive_and_leaves_the_first_content(store: Storage) -> None:
    store.create("folder/commit", b"first")
    with pytest.raises(AlreadyExistsError, match=r"store/folder/commit' exists already: another writer was first"):
        store.create("folder/commit", b"second")
    assert store.read("folder/commit") == b"first"
    assert store.list("folder") == ["commit"]
    store.delete("folder/commit")
    store.create("folder/commit", b"third")
    assert store.read("folder/commit") == b"third"


@pytest.mark.parametrize("kind", [fs.FileType.File, fs.FileType.Directory])
def test_what_another_process_removes_meanwhile_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: fs.FileType
) -> None:
    monkeypatch.setattr(Storage, "_kind", lambda self, name: kind)
    Storage.at(tmp_path).delete("gone")


@pytest.mark.parametrize("said", [errno.EEXIST, errno.ESTALE])
def test_a_creation_whose_answer_is_lost_is_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: int) -> None:
    """A network file system that makes the link, and says that it is there already or that it is away."""
    link = os.link

    def answered(source: Path, name: Path) -> None:
        link(source, name)
        raise OSError(said, os.strerror(said))

    monkeypatch.setattr(os, "link", answered)
    store = Storage.at(tmp_path)
    store.create("commit", b"ours")
    assert store.read("commit") == b"ours" and store.list() == ["commit"]


def test_the_note_of_numbered_records_counts_one_that_a_listing_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = NumberedRecords(Storage.at(tmp_path), "moves", lambda number: number)
    for number, listed in ((1, []), (2, [1])):
        with monkeypatch.context() as patch:
            patch.setattr(records, "numbers", lambda listed=listed: listed)
            records.create(number, {"format": 1})
    (tmp_path / records.file(2)).unlink()
    with pytest.raises(DamagedError, match=r"000002\.json' is missing"):
        records.newest()


def test_of_racing_threads_exactly_one_wins(store: Storage) -> None:
    for round_ in range(5):
        start = threading.Barrier(WRITERS)

        def claim(writer: int, name: str = f"commit-{round_}", start: threading.Barrier = start) -> int | None:
            start.wait()
            return _claim(store, name, writer)

        with ThreadPoolExecutor(WRITERS) as pool:
            winners = [writer for writer in pool.map(claim, range(WRITERS)) if writer is not None]
        assert len(winners) == 1
        assert store.read(f"commit-{round_}") == b"%d" % winners[0]


def test_of_racing_processes_exactly_one_wins(store: Storage, fork_server: ForkServer, tmp_path: Path) -> None:
    calls = [Call("test_storage:race", (store.address, w, tmp_path), tmp_path / f"log{w}") for w in range(RACING)]
    fork_server.run(calls, 60)
    claims = [json.loads((tmp_path / f"claims{writer}").read_text()) for writer in range(RACING)]
    for name in range(10):
        winners = [won[name] for won in claims if won[name] is not None]
        assert len(winners) == 1
        assert store.read(f"commit-{name}") == b"%d" % winners[0]
    assert len(store.list()) == 10


def race(address: str, writer: int, folder: Path) -> None:
    """One of the racing processes: claim every name, as soon as all others are there."""
    store = Storage.at(address)
    assert not store.exists("nothing")
    (folder / f"ready{writer}").touch()
    while len(list(folder.glob("ready*"))) < RACING:
        time.sleep(0.001)
    won = [_claim(store, f"commit-{name}", writer) for name in range(10)]
    (folder / f"claims{writer}").write_text(json.dumps(won))


def _claim(store: Storage, name: str, writer: int) -> int | None:
    try:
        store.create(name, b"%d" % writer)
    except AlreadyExistsError:
        return None
    return writer


def test_readers_never_see_a_part_while_a_file_is_replaced(store: Storage) -> None:
    contents = [b"%d" % turn * size for turn, size in enumerate((200_000, 300_000, 100_000, 250_000, 1_000))]
    store.write("file", contents[0])
    stop = threading.Event()

    def rewrite() -> None:
        for turn in range(200 if store.is_local else 9):  # fewer than the tries of a read
            store.write("file", contents[turn % len(contents)])
        stop.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not stop.is_set():
        assert store.read("file") in contents
    writer.join()


def test_an_object_replaced_between_its_length_and_its_bytes_is_read_again(
    s3_uri: Callable[[str], str],
) -> None:
    store = Storage.at(s3_uri("replaced"))
    versions = iter([b"longer", b"s", b"longest of all", b"", b"x"])
    store.write("file", b"first")
    opened = store.filesystem.open_input_file

    class Replaced:
        """The real file system, with a writer that strikes right after a file was opened."""

        def __getattr__(self, name: str) -> object:
            return getattr(store.filesystem, name)

        def open_input_file(self, path: str) -> object:
            stream = opened(path)
            fresh = next(versions, None)
            if fresh is not None:
                store.write("file", fresh)
            return stream

    spied = Storage(store.uri, Replaced(), store.root, store.endpoint)
    assert spied.read("file") == b"x"
    versions = iter([b"%d" % turn for turn in range(100)])
    with pytest.raises(StorageError, match="it is replaced during every read"):
        spied.read("file")


def test_reading_what_is_not_there_names_the_file(store: Storage) -> None:
    with pytest.raises(StorageError, match=r"cannot read '.*store/nothing'"):
        store.read("nothing")
    with pytest.raises(StorageError, match="cannot read"), store.open("nothing"):
        pass


def test_listing_a_file_is_an_error(store: Storage) -> None:
    store.write("file", b"1")
    with pytest.raises(StorageError, match="it is a file, give the folder that holds it"):
        store.list("file")


def test_a_folder_that_appears_while_it_is_listed_is_no_error(tmp_path: Path) -> None:
    """pyarrow finds no folder, then that there is one."""
    store, looks = Storage.at(tmp_path), list[object]()

    class Appearing:
        """The real file system, where the first look comes too early."""

        def get_file_info(self, selector: object) -> object:
            looks.append(selector)
            if len(looks) == 1:
                store.write("folder/file", b"1")
                raise FileNotFoundError(errno.ENOENT, "Cannot list directory")
            return store.filesystem.get_file_info(selector)

    seen = Storage(store.uri, Appearing(), store.root)
    assert list(seen.files("folder")) == ["folder/file"] and len(looks) == 2


def test_broken_json_names_the_file(store: Storage) -> None:
    store.write("bad.json", b'{"a": ')
    with pytest.raises(StorageError, match=r"store/bad\.json' is not valid JSON"):
        store.read_json("bad.json")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Storage.at(tmp_path)
    store.write("file", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for attempt in (store.write, store.create):
        with pytest.raises(StorageError, match="No space left on device"):
            attempt("file", b"new")
    assert store.read("file") == b"old"
    assert [left.name for left in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_writer_left_is_not_listed(tmp_path: Path) -> None:
    store = Storage.at(tmp_path)
    store.write("whole.tmp", b"1")
    (tmp_path / f"manifest.json.{'0a' * 16}.tmp").write_bytes(b"half")
    assert store.list() == ["whole.tmp"]


def test_a_file_in_the_way_of_a_folder_is_a_storage_error(tmp_path: Path) -> None:
    store = Storage.at(tmp_path)
    store.write("file", b"1")
    for attempt in (store.write, store.create):
        with pytest.raises(StorageError, match=r"cannot (write|create) '.*/file/below'"):
            attempt("file/below", b"1")


@pytest.mark.parametrize("name", ["a b", "50%", "what?", "a#b", "ä"])
def test_local_paths_may_hold_any_characters(tmp_path: Path, name: str) -> None:
    store = Storage.at(tmp_path / name)
    assert Storage.at(Storage.at(f"file://{tmp_path}").sub(name).address) == store
    store.write("file", b"1")
    assert (tmp_path / name / "file").read_bytes() == b"1"
    assert store.uri == str(tmp_path / name)
    assert store.endpoint is None


def test_relative_home_and_file_uris_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("runs/one", "~/runs/one", f"file://{tmp_path}/runs/one", f"{tmp_path}/runs/one/"):
        assert Storage.at(path).path("x") == f"{tmp_path}/runs/one/x"
        assert Storage.at(path).is_local


@pytest.mark.parametrize("uri", ["nope://x/y", "s3://key:secret@bucket/x"])
def test_places_that_cannot_be_opened(uri: str) -> None:
    with pytest.raises(StorageError) as caught:
        Storage.at(uri)
    assert "secret@" not in str(caught.value)


def test_the_query_of_a_uri_stays_out_of_names(s3_uri: Callable[[str], str]) -> None:
    store = Storage.at(s3_uri("somewhere"))
    assert store.uri == f"s3://{BUCKET}/somewhere"
    assert store.endpoint == "http://" + s3_uri("").split("endpoint_override=")[1].split("&")[0]


def test_the_region_of_a_uri_is_that_of_every_request(
    s3_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow and boto3 sign for it, in other processes too."""
    store = Storage.at(f"{s3_uri('elsewhere')}&region=eu-west-1&allow_bucket_deletion=true").sub("folder")
    again = Storage.at(store.address)
    assert (
        store.address.endswith("&allow_bucket_deletion=true")
        and again == store
        and again.filesystem.region == "eu-west-1"
    )
    regions: list[object] = []
    client = boto3.client

    def watched(*args: object, **kwargs: object) -> object:
        regions.append(kwargs["region_name"])
        return client(*args, **kwargs)

    monkeypatch.setattr(boto3, "client", watched)
    again.create("file", b"1")
    assert regions == ["eu-west-1"] and store.read("file") == b"1"


def test_a_missing_bucket_and_a_dead_server_are_storage_errors(
    s3_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Storage.at(s3_uri("x").replace(f"s3://{BUCKET}", "s3://no-such-bucket"))
    for attempt in (missing.write, missing.create):
        with pytest.raises(StorageError, match=r"cannot (write|create) 's3://no-such-bucket/x/file'"):
            attempt("file", b"1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    dead = Storage.at(f"s3://{BUCKET}/x?endpoint_override=127.0.0.1:1&scheme=http")
    with pytest.raises(StorageError, match="cannot create"):
        dead.create("file", b"1")


def test_a_retried_put_recognises_its_own_object(s3_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 sends a put again when the connection breaks; S3 then refuses it because of our own first one."""
    store = Storage.at(s3_uri("lost-answer"))
    monkeypatch.setattr(boto3, "client", _twice(boto3.client))
    store.create("commit", b"ours")
    assert store.read("commit") == b"ours"
    with pytest.raises(AlreadyExistsError):
        store.create("commit", b"theirs")


def _twice(client: Callable[..., object]) -> Callable[..., object]:
    def make(*args: object, **kwargs: object) -> object:
        made = client(*args, **kwargs)
        put = made.put_object  # type: ignore[attr-defined]

        def put_twice(**parts: object) -> object:
            put(**parts)
            return put(**parts)

        made.put_object = put_twice  # type: ignore[attr-defined]
        return made

    return make


def test_other_file_systems_refuse_to_commit(tmp_path: Path) -> None:

    store = Storage("mock://here", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "")
    with pytest.raises(StorageError, match="offers no exclusive creation"):
        store.create("file", b"1")


def test_without_boto3_the_message_names_the_package(
    s3_uri: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(StorageError, match=r"pip install 'raycl\[s3\]'"):
        Storage.at(s3_uri("x")).create("file", b"1")


def test_every_temporary_name_is_one_that_lists_skip(tmp_path: Path) -> None:
    with finished_beside(tmp_path / "file", (b"1", b"2")) as temporary:
        assert temporary.read_bytes() == b"12"
        assert Storage.at(tmp_path).list() == []
    assert not temporary.exists()


def test_staged_files_get_their_name_later_or_none(store: Storage) -> None:
    with store.staging("objects", b"one", memoryview(b"two")) as write_as:
        write_as("objects/ab/name")
    assert store.read("objects/ab/name") == b"onetwo"
    with store.staging("objects", b"nobody wants this"):
        pass
    with pytest.raises(KeyError), store.staging("objects", b"nor this"):
        raise KeyError
    assert list(store.files()) == ["objects/ab/name"]


def test_staging_on_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    store = Storage.at(tmp_path)
    with pytest.raises(StorageError, match="No space left"), store.staging("objects", b"data") as write_as:
        write_as("objects/name")
    assert store.files() == {}


@pytest.mark.parametrize("uri", ["s3://me:s3cret@b/x", "s3://b/x?endpoint_override=http://me:s3cret@127.0.0.1:1"])
def test_a_secret_in_an_address_is_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(StorageError, match="the URI holds a secret") as refused:
        Storage.at(uri)
    assert "s3cret" not in str(refused.value)
