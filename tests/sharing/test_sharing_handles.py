"""Handles travel: publications and checkpoints through pickles, forks, queues and sockets; nothing is copied."""

from __future__ import annotations

import array
import copy
import multiprocessing
import os
import pickle
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 on: beside threads
linux = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
TENSORS = {"w": np.arange(10_000.0), "v": np.ones(3, "f4")}


def mappings_of(inode: int) -> int:
    with open("/proc/self/maps") as f:
        return sum(int(line.split()[4]) == inode for line in f)


def inode_of(publication: tensorio.Publication) -> int:
    return os.fstat(publication.fileno()).st_ino


# ------------------------------------------------------------------ publications


@linux
def test_pickled_publication_is_the_same_memory() -> None:
    with tensorio.publish(TENSORS) as publication:
        raw = pickle.dumps(publication)
        assert len(raw) < 2000
        again = pickle.loads(raw)
        assert inode_of(again) == inode_of(publication)
        assert (again.kind, again.nbytes, again.format) == (publication.kind, publication.nbytes, publication.format)
        with again.open() as checkpoint:
            assert np.array_equal(checkpoint["w"], TENSORS["w"])
        again.close()
        assert publication.open()["w"][5] == 5  # closing a copy closes the copy


def first(publication: tensorio.Publication, answers: Any) -> None:
    with publication.open() as checkpoint:
        answers.put((float(checkpoint["w"][7]), inode_of(publication)))


@linux
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_publication_is_an_argument_of_a_process(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    with tensorio.publish(TENSORS) as publication:
        answers = context.SimpleQueue()
        process = context.Process(target=first, args=(publication, answers))
        process.start()
        assert answers.get() == (7.0, inode_of(publication))
        process.join(30)
        assert process.exitcode == 0
        process.close()
        assert publication.open()["w"][7] == 7


@linux
def test_forked_child_that_ends_leaves_the_name_to_its_parent(in_child: Any) -> None:
    with tensorio.publish(TENSORS, "m") as publication:
        in_child(publication.close)
        assert tensorio.attach("m")["w"][1] == 1


@linux
def test_publication_that_was_closed_before_it_arrives_is_said() -> None:
    with tensorio.publish(TENSORS) as publication:
        raw = pickle.dumps(publication)
    with pytest.raises(tensorio.NotPublishedError, match="was closed by process"):
        pickle.loads(raw)
    for use in (publication.open, publication.fileno, lambda: pickle.dumps(publication)):
        with pytest.raises(ValueError, match="the publication is closed"):
            use()
    publication.close()
    assert "closed" in repr(publication)


def test_unnamed_publication_goes_with_its_object() -> None:
    before = cases.open_descriptors()
    for _ in range(3):
        tensorio.publish(TENSORS)
    assert cases.open_descriptors() == before


@linux
def test_descriptor_goes_over_a_socket() -> None:
    """As between containers, which do not see each other's processes."""
    ours, theirs = socket.socketpair()
    with ours, theirs, tensorio.publish(TENSORS) as publication:
        fds = array.array("i", [publication.fileno()])
        ours.sendmsg([b"w"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        _, fds_received, _, _ = socket.recv_fds(theirs, 1, 1)
        with tensorio.attach(fds_received[0]) as checkpoint:
            os.close(fds_received[0])
            assert np.array_equal(checkpoint["w"], TENSORS["w"])
            again = pickle.loads(pickle.dumps(checkpoint))
            assert np.array_equal(again["w"], TENSORS["w"])


def test_publication_is_a_name_of_itself() -> None:
    with tensorio.publish(TENSORS) as publication, tensorio.attach(publication, writable=True) as checkpoint:
        checkpoint["w"][0] = 5
        assert publication.open()["w"][0] == 0


def test_publication_says_what_it_is() -> None:
    with tensorio.publish(TENSORS, "m") as publication:
        assert repr(publication) == f"<Publication 'm': {publication.nbytes} bytes of torch_zip in memory>"


# --------------------------------------------------------- attached checkpoints


@linux
@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("copied", [lambda c: pickle.loads(pickle.dumps(c)), copy.copy, copy.deepcopy],
                         ids=["pickle", "copy", "deepcopy"])  # fmt: skip
def test_pickled_attached_checkpoint_maps_the_same_memory(writable: bool, copied: Any) -> None:
    with tensorio.publish(TENSORS, "m") as publication, tensorio.attach("m", writable=writable) as checkpoint:
        again = copied(checkpoint)
        assert mappings_of(inode_of(publication)) == 2
        assert np.array_equal(again["w"], TENSORS["w"])
        assert again["w"].flags.writeable == writable


@linux
def test_pickled_attached_checkpoint_is_had_of_its_sender_when_the_publisher_is_gone() -> None:
    publication = tensorio.publish(TENSORS)
    checkpoint = publication.open()
    publication.close()
    again = pickle.loads(pickle.dumps(checkpoint))
    assert np.array_equal(again["w"], TENSORS["w"])
    checkpoint.close()
    third = pickle.loads(pickle.dumps(again))
    assert np.array_equal(third["w"], TENSORS["w"])


@linux
def test_pickled_attached_checkpoint_of_the_dead_is_an_error() -> None:
    publication = tensorio.publish(TENSORS)
    checkpoint = publication.open()
    raw = pickle.dumps(checkpoint)
    publication.close()
    checkpoint.close()
    with pytest.raises(tensorio.NotPublishedError):
        pickle.loads(raw)
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(checkpoint)


# -------------------------------------------------------- checkpoints of files


@linux
@pytest.mark.parametrize(
    "options", [{}, {"writable": True}, {"mmap": False}, {"mmap": False, "writable": True}], ids=str
)
@pytest.mark.parametrize("name", list(cases.CASES))
def test_pickled_checkpoint_of_every_format_opens_the_same_file(name: str, options: dict[str, bool],
                                                                tmp_path: Path) -> None:  # fmt: skip
    case = cases.CASES[name]()
    path = tmp_path / f"model{case.suffix}"
    path.write_bytes(case.data)
    with tensorio.open(path, **options) as checkpoint:  # type: ignore[arg-type]
        raw = pickle.dumps(checkpoint)
        assert len(raw) < 2000 + len(str(path))
        again = pickle.loads(raw)
        assert again.format == checkpoint.format
        assert list(again) == list(case.tensors)
        for fqn, array_ in case.tensors.items():
            assert again[fqn].tobytes() == array_.tobytes()
            assert again[fqn].flags.writeable == options.get("writable", False)
        if "mmap" not in options and len(case.data) > 0:
            assert mappings_of(path.stat().st_ino) == 2


def test_pickled_checkpoint_does_not_depend_on_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorio.save(TENSORS, tmp_path / "m.pt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with tensorio.open("m.pt") as checkpoint:
        assert checkpoint.path == "m.pt"
        monkeypatch.chdir("elsewhere")
        again = pickle.loads(pickle.dumps(checkpoint))
        assert np.array_equal(again["w"], TENSORS["w"])


@pytest.mark.parametrize("source", ["buffer", "file"])
def test_checkpoint_without_a_path_can_not_be_pickled(source: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    tensorio.save(TENSORS, path)
    with open(path, "rb") as f, tensorio.open(f if source == "file" else path.read_bytes()) as checkpoint:
        with pytest.raises(TypeError, match="no path to open again"):
            pickle.dumps(checkpoint)
        with tensorio.publish(checkpoint) as publication, publication.open() as shared:  # what to do instead
            assert np.array_equal(shared["w"], checkpoint["w"])


def test_view_is_pickled_as_a_copy(tmp_path: Path) -> None:
    """NumPy's own rule: whoever wants to share sends the checkpoint."""
    with tensorio.publish(TENSORS) as publication, publication.open() as checkpoint:
        assert len(pickle.dumps(checkpoint["w"])) > TENSORS["w"].nbytes
        assert len(pickle.dumps(checkpoint)) < 2000
