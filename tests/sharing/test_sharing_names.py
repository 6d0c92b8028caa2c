"""The life of a name: owners that die, names that are taken, replaced, left over, or not to be trusted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import tensorio
from sharers import Stranger, ending, kill, publisher, python
from tensorio.sharing._registry import GRACE, Registry
from tensorio.system import processes

linux = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that can't be mapped as it is: its payload begins at an odd address."""
    path = tmp_path / "model.safetensors"
    return write(path, 1.0)


def write(path: Path, value: float) -> Path:
    tensorio.save({"w": np.full(10_000, value)}, path, durable=False)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    return path


def names() -> list[str]:
    return [entry.name for entry in tensorio.published()]


# ------------------------------------------------------------------------ a life


def test_name_lives_until_it_is_closed(model: Path, registry: Path) -> None:
    with tensorio.publish(model, "m") as publication:
        (entry,) = tensorio.published()
        assert entry[:4] == ("m", "memory", "safetensors", publication.nbytes)
        assert entry.owners == (os.getpid(),)
        assert entry.alive
        assert not entry.persistent
        assert abs(entry.created - time.time()) < 60
        attached = tensorio.attach("m")
    with pytest.raises(tensorio.NotPublishedError, match="nothing is published under the name 'm'"):
        tensorio.attach("m")
    assert attached["w"][0] == 1
    assert list(registry.iterdir()) == []


def test_name_lives_though_nobody_keeps_the_object(model: Path) -> None:
    tensorio.publish(model, "m")
    import gc

    gc.collect()
    assert tensorio.attach("m")["w"][0] == 1
    tensorio.unpublish("m")
    assert names() == []


@linux
def test_name_goes_with_a_process_that_ends(model: Path, registry: Path) -> None:
    process = publisher(str(model), "m")
    with ended(process):
        assert tensorio.attach("m")["w"][0] == 1
        process.communicate("", timeout=30)  # an orderly end
    assert list(registry.iterdir()) == []


@contextlib.contextmanager
def ended(process: Any) -> Any:
    try:
        yield
    finally:
        if process.poll() is None:
            kill(process)


@linux
def test_owner_killed_readers_go_on_and_new_ones_are_told(model: Path, registry: Path) -> None:
    process = publisher(str(model), "m")
    with ended(process):
        reader = Stranger("m")
        assert reader.ask("value", "w") == 1
    with ending(reader):  # the owner has been killed
        assert [(e.name, e.alive, e.owners) for e in tensorio.published()] == [("m", False, ())]
        message = rf"its owner \(process {process.pid}\) has ended; publish it again"
        with pytest.raises(tensorio.NotPublishedError, match=message):
            tensorio.attach("m")
        assert reader.ask("value", "w") == 1
    assert list(registry.iterdir()) == []  # the stale name went with the message
    with pytest.raises(tensorio.NotPublishedError, match="nothing is published"):
        tensorio.attach("m")


@linux
def test_stale_name_is_free(model: Path) -> None:
    kill(publisher(str(model), "m"))
    with tensorio.publish(model, "m"):
        assert tensorio.attach("m")["w"][0] == 1


def test_plain_file_has_a_name_as_long_as_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    tensorio.save({"w": np.ones(3)}, path)
    with tensorio.publish(path, "m") as publication:
        assert (publication.kind, publication.path) == ("file", str(path))
        checkpoint = tensorio.attach("m")
        assert checkpoint.path == str(path)
    with pytest.raises(tensorio.NotPublishedError):
        tensorio.attach("m")


@linux
def test_name_of_a_plain_file_goes_with_a_killed_owner(tmp_path: Path, registry: Path) -> None:
    path = tmp_path / "model.pt"
    tensorio.save({"w": np.ones(3)}, path)
    kill(publisher(str(path), "m"))
    with pytest.raises(tensorio.NotPublishedError, match="has ended"):
        tensorio.attach("m")
    assert list(registry.iterdir()) == []


@linux
def test_plain_file_that_was_replaced_is_still_the_published_one(tmp_path: Path) -> None:
    """The publisher has it open: readers get what was published, until it publishes the new one."""
    path = tmp_path / "model.pt"
    tensorio.save({"w": np.full(3, 1.0)}, path)
    with tensorio.publish(path, "m"):
        tensorio.save({"w": np.full(3, 2.0)}, path)
        reader = Stranger("m")
        with ending(reader):
            assert reader.ask("value", "w") == 1
        with tensorio.publish(path, "m", replace=True):
            assert tensorio.attach("m")["w"][0] == 2


def test_plain_file_that_was_written_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    tensorio.save({"w": np.full(3, 1.0)}, path)
    with tensorio.publish(path, "m"):
        with open(path, "ab") as f:
            f.write(b"\0")
        with pytest.raises(tensorio.PublicationError, match="was replaced or changed since"):
            tensorio.attach("m")


# ---------------------------------------------------------------- kept ones


@linux
def test_kept_name_outlives_its_publisher(model: Path, registry: Path) -> None:
    kill(publisher(str(model), "m", persistent=True))
    (entry,) = tensorio.published()
    assert (entry.kind, entry.persistent, entry.alive, entry.path) == ("kept", True, True, None)
    checkpoint = tensorio.attach("m")
    tensorio.unpublish("m")
    assert list(registry.iterdir()) == []
    assert checkpoint["w"][0] == 1
    with pytest.raises(tensorio.NotPublishedError):
        tensorio.unpublish("m")


@linux
def test_kept_name_of_a_plain_file_copies_nothing(tmp_path: Path, registry: Path) -> None:
    path = tmp_path / "model.pt"
    tensorio.save({"w": np.ones(3)}, path)
    kill(publisher(str(path), "m", persistent=True))
    assert [f.name for f in registry.iterdir()] == ["m.json"]
    assert tensorio.attach("m").path == str(path)


def test_closing_does_not_withdraw_what_is_kept(model: Path) -> None:
    with tensorio.publish(model, "m", persistent=True):
        pass
    assert tensorio.attach("m")["w"][0] == 1
    tensorio.unpublish("m")


def test_kept_file_that_is_gone_is_said(model: Path, registry: Path) -> None:
    with tensorio.publish(model, "m", persistent=True):
        pass
    (file,) = registry.glob("*.segment")
    file.unlink()
    with pytest.raises(tensorio.NotPublishedError, match="its file is gone"):
        tensorio.attach("m")
    assert names() == []


# --------------------------------------------------------------- names in use


@linux
def test_name_that_is_taken_is_refused_and_says_by_whom(model: Path) -> None:
    process = publisher(str(model), "m")
    with ended(process):
        with pytest.raises(tensorio.NameTakenError, match=rf"already \(by process {process.pid}\).*replace=True"):
            tensorio.publish(model, "m")
    with tensorio.publish(model, "kept", persistent=True):
        with pytest.raises(tensorio.NameTakenError, match="unpublish it"):
            tensorio.publish(model, "kept")
        tensorio.unpublish("kept")


def test_owner_that_ends_just_when_another_joins(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found once is held: it is not looked for a second time."""
    from tensorio.sharing import _publish

    really, calls = _publish.reach_named, []

    def once(manifest: Any) -> Any:
        calls.append(manifest)
        if len(calls) > 1:
            raise tensorio.NotPublishedError("its owner has ended")
        return really(manifest)

    with tensorio.publish(model, "m"):
        monkeypatch.setattr(_publish, "reach_named", once)
        with tensorio.publish(model, "m", exist_ok=True) as publication, publication.open() as checkpoint:
            assert checkpoint["w"][0] == 1


def test_name_that_goes_with_its_owner_is_not_used_for_one_that_is_to_stay(model: Path) -> None:
    with tensorio.publish(model, "m"):
        with pytest.raises(tensorio.NameTakenError, match=rf"as long as its owner lives \(process {os.getpid()}\)"):
            tensorio.publish(model, "m", exist_ok=True, persistent=True)
        tensorio.publish(model, "m", replace=True, persistent=True).close()
    tensorio.publish(model, "m", exist_ok=True, persistent=True).close()
    tensorio.publish(model, "m", exist_ok=True).close()
    assert tensorio.attach("m")["w"][0] == 1
    tensorio.unpublish("m")


@linux
def test_memory_goes_with_the_name_that_was_replaced_or_withdrawn(model: Path) -> None:
    before = cases.open_descriptors()
    kept = tensorio.publish(model, "m")
    for _ in range(3):
        tensorio.publish(model, "m", replace=True)
        assert cases.open_descriptors() == before + 2
    tensorio.publish(model, "m", exist_ok=True)
    tensorio.unpublish("m")
    assert cases.open_descriptors() == before + 1
    with kept.open() as checkpoint:
        assert checkpoint["w"][0] == 1
    kept.close()
    tensorio.publish(model, "m")
    with tensorio.publish(model, "m", replace=True, persistent=True):
        assert cases.open_descriptors() == before + 1
    tensorio.unpublish("m")
    assert cases.open_descriptors() == before


@pytest.mark.parametrize("persistent", [False, True])
def test_replaced_name_swaps_generations(persistent: bool, model: Path, registry: Path) -> None:
    first = tensorio.publish(model, "m", persistent=persistent)
    old = tensorio.attach("m")
    second = tensorio.publish(write(model, 2.0), "m", persistent=persistent, replace=True)
    assert tensorio.attach("m")["w"][0] == 2
    assert old["w"][0] == 1
    first.close()  # no longer its name
    assert tensorio.attach("m")["w"][0] == 2
    assert old["w"][0] == 1
    second.close()
    if persistent:
        assert len(list(registry.glob("*.segment"))) == 1
        tensorio.unpublish("m")
    assert list(registry.iterdir()) == []


SWAPPER = """
import sys, tensorio, numpy as np
old = None
for value in range(1, 41):
    new = tensorio.publish({"w": np.full(2000, float(value))}, "m", replace=value > 1, persistent=sys.argv[1] == "kept")
    if old is not None:
        old.close()
    old = new
    if value == 1:
        print("begun", flush=True)
print("done", flush=True)
sys.stdin.read()
"""


@linux
@pytest.mark.parametrize("kind", ["memory", "kept"])
def test_whoever_attaches_while_versions_are_swapped_has_one_of_them_whole(kind: str, registry: Path) -> None:
    process = python(SWAPPER, kind)
    with ended(process):
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        seen = [0.0]
        while seen[-1] < 40:
            with tensorio.attach("m") as checkpoint:
                (value,) = np.unique(checkpoint["w"])
            seen.append(float(value))
        assert seen == sorted(seen)
    if kind == "kept":
        tensorio.unpublish("m")


RACER = """
import sys, time, tensorio
path, start = sys.argv[1], float(sys.argv[2])
time.sleep(max(0, start - time.time()))
built = []
publication = tensorio.publish(path, "m", exist_ok=True, timeout=20, progress=lambda done, total: built.append(done))
with publication.open() as checkpoint:
    print(bool(built), publication.fileno() >= 0, float(checkpoint["w"][0]), flush=True)
sys.stdin.read()
"""


@linux
def test_first_of_many_publishers_builds_and_the_others_use_it(model: Path, registry: Path) -> None:
    start = str(time.time() + 1)
    racers = [python(RACER, str(model), start) for _ in range(5)]
    try:
        answers = [r.stdout.readline().split() for r in racers if r.stdout is not None]
        assert sorted(a[0] for a in answers) == ["False"] * 4 + ["True"]
        assert {tuple(a[1:]) for a in answers} == {("True", "1.0")}
        (entry,) = tensorio.published()
        assert set(entry.owners) == {r.pid for r in racers}
        builder = next(r for r, a in zip(racers, answers, strict=True) if a[0] == "True")
        kill(builder)
        assert tensorio.attach("m")["w"][0] == 1  # the others hold it
        for racer in racers:
            if racer is not builder:
                racer.communicate("", timeout=30)
        assert list(registry.iterdir()) == []
    finally:
        for racer in racers:
            if racer.poll() is None:
                kill(racer)


SLOW = """
import sys, time, tensorio
def wait(done, total):
    print("half way", flush=True)
    time.sleep(60)
tensorio.publish(sys.argv[1], "m", progress=wait, persistent=sys.argv[2] == "kept")
"""


@linux
@pytest.mark.parametrize("kind", ["memory", "kept"])
def test_publisher_that_dies_half_way_holds_up_nobody(kind: str, model: Path, registry: Path) -> None:
    slow = python(SLOW, str(model), kind)
    with ended(slow):
        assert slow.stdout is not None
        assert slow.stdout.readline() == "half way\n"
        with pytest.raises(tensorio.NotPublishedError):
            tensorio.attach("m")
        with pytest.raises(tensorio.PublicationError, match="still publishing the name 'm'"):
            tensorio.publish(model, "m", exist_ok=True, timeout=0.1)
        waiting = python(RACER, str(model), "0")
        with ended(waiting):
            time.sleep(0.5)
            assert waiting.poll() is None
            kill(slow)
            assert waiting.stdout is not None
            assert waiting.stdout.readline().split() == ["True", "True", "1.0"]
    assert list(registry.glob("*.segment")) == []  # what the first had begun is gone


@linux
def test_memory_of_a_publisher_who_was_killed_half_way_can_be_removed(model: Path, registry: Path) -> None:
    slow = python(SLOW, str(model), "kept")
    with ended(slow):
        assert slow.stdout is not None
        slow.stdout.readline()
        kill(slow)
    assert len(list(registry.glob("m.*.segment"))) == 1
    tensorio.unpublish("m")
    assert list(registry.iterdir()) == []
    with pytest.raises(tensorio.NotPublishedError):
        tensorio.unpublish("m")


def test_attach_waits_for_a_name_as_long_as_it_is_told(model: Path) -> None:
    start = time.monotonic()
    with pytest.raises(tensorio.NotPublishedError):
        tensorio.attach("m", timeout=0.2)
    assert 0.2 <= time.monotonic() - start < 5
    process = python(
        "import sys, tensorio\ncheckpoint = tensorio.attach('m', timeout=30)\nprint(checkpoint['w'][0], flush=True)"
    )
    with ended(process), tensorio.publish(model, "m"):
        assert process.stdout is not None
        assert process.stdout.readline() == "1.0\n"


@linux
def test_attach_does_not_wait_for_who_publishes_a_stale_name_anew(model: Path, registry: Path) -> None:
    with ended(publisher(str(model), "m")):
        pass
    with Registry() as names, names.locked("m"):
        start = time.monotonic()
        with pytest.raises(tensorio.NotPublishedError, match="has ended"):
            tensorio.attach("m", timeout=0)
        assert time.monotonic() - start < GRACE / 2
        assert (registry / "m.json").exists()


def test_threads_of_one_process_that_publish_a_name_build_it_once(model: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    built: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(tensorio.publish, model, "m", exist_ok=True, progress=lambda d, t: built.append(d))
                for _ in range(4)]  # fmt: skip
        publications = [job.result() for job in jobs]
    assert len(built) == len(set(built))
    for publication in publications[:-1]:
        publication.close()
        assert tensorio.attach("m")["w"][0] == 1
    publications[-1].close()
    assert names() == []


# ------------------------------------------------------------ names not to be trusted


def manifest(registry: Path, name: str = "m", **changes: Any) -> Path:
    """Change what is said of a published name."""
    file = registry / f"{name}.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, **changes}))
    return file


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"tensorio": 2}', '{"tensorio": 1}', "[" * 100_000, '"' + "x" * (2 << 20) + '"', "\xff\xfe",
    '{"tensorio": 1, "name": "m", "kind": 3}', '{"tensorio": 1, "name": "other"}',
], ids=["empty", "cut", "list", "null", "version", "bare", "deep", "long", "bytes", "type", "other_name"])  # fmt: skip
def test_damaged_manifest_is_refused(text: str, model: Path, registry: Path) -> None:
    (registry / "m.json").write_bytes(text.encode("latin-1"))
    for call in (lambda: tensorio.attach("m"), lambda: tensorio.publish(model, "m"), tensorio.published):
        with pytest.raises(tensorio.PublicationError, match="refused the manifest of the published name 'm'") as caught:
            call()
        assert "m.json" in str(caught.value)
        assert len(str(caught.value)) < 500
    with tensorio.publish(model, "m", replace=True):
        assert tensorio.attach("m")["w"][0] == 1


@pytest.mark.parametrize(("key", "value"), [
    ("identity", [1, 2, 3]), ("identity", [1, 2, 3, "x"]), ("identity", [1, 2, 3, -1]), ("holders", [[1, 2]]),
    ("holders", [[1 << 31, 0, 3]]), ("holders", [[1, 0, 1 << 40]]), ("identity", [1, 1 << 64, 3, 4]),
    ("holders", [5]), ("kind", "somewhere"), ("unknown", "run"), ("nbytes", 1.5), ("nbytes", True), ("path", 7),
    ("path", "a\0b"), ("path", "\ud800"), ("created", float("nan")), ("created", float("inf")),
    ("created", 10**400),
])  # fmt: skip
def test_manifest_with_a_wrong_value_is_refused(key: str, value: Any, model: Path, registry: Path) -> None:
    with tensorio.publish(model, "m"):
        manifest(registry, **{key: value})
        with pytest.raises(tensorio.PublicationError, match="refused the manifest"):
            tensorio.attach("m")


@linux
def test_holder_that_is_another_process_is_refused(model: Path, registry: Path) -> None:
    """An id that was given to another process: it is not even asked what it has open."""
    other = python("import sys; print('here', flush=True); sys.stdin.read()")
    with ended(other), tensorio.publish(model, "m"):
        assert other.stdout is not None
        other.stdout.readline()
        manifest(registry, holders=[[other.pid, processes.start_time(os.getpid()) or 1, 0]])
        with pytest.raises(tensorio.NotPublishedError, match="has ended"):
            tensorio.attach("m")
    with ended(other), tensorio.publish(model, "m"):
        pass


@linux
def test_descriptor_that_is_something_else_is_refused(model: Path, registry: Path) -> None:
    """The right process, but not the right file: a terminal, a pipe, another segment."""
    other = python("import sys; print('here', flush=True); sys.stdin.read()")
    with ended(other), tensorio.publish(model, "m"):
        assert other.stdout is not None
        other.stdout.readline()
        manifest(registry, holders=[[other.pid, processes.start_time(other.pid), fd] for fd in range(64)])
        with pytest.raises(tensorio.NotPublishedError, match="was closed by process"):
            tensorio.attach("m")
        assert names() == ["m"]  # its owner lives: it is not for us to remove


def test_identity_must_be_exact(model: Path, registry: Path) -> None:
    with tensorio.publish(model, "m") as publication:
        status = os.fstat(publication.fileno())
        for size, mtime in ((status.st_size - 1, status.st_mtime_ns), (status.st_size, status.st_mtime_ns - 1)):
            manifest(registry, identity=[status.st_dev, status.st_ino, size, mtime])
            with pytest.raises(tensorio.PublicationError, match="was closed by process"):
                tensorio.attach("m")


@pytest.mark.parametrize("change", [-1, 1, 1 << 70, -(1 << 70)])
def test_bytes_that_count_must_be_exact(change: int, model: Path, registry: Path) -> None:
    """Limits are made of it: what another user says must not widen them."""
    with tensorio.publish(model, "m") as publication:
        manifest(registry, nbytes=publication.nbytes + change)
        with pytest.raises(tensorio.PublicationError, match=r"expected -?\d+ bytes that count, found"):
            tensorio.attach("m")


def test_memory_that_is_not_sealed_is_refused(registry: Path, model: Path) -> None:
    with tensorio.publish(model, "m") as publication:
        fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, os.pread(publication.fileno(), publication.nbytes, 0))
            s = os.fstat(fd)
            manifest(registry, identity=[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns],
                     holders=[[os.getpid(), processes.start_time(os.getpid()), fd]])  # fmt: skip
            with pytest.raises(tensorio.PublicationError, match="sealed"):
                tensorio.attach("m")
        finally:
            os.close(fd)


def test_name_from_before_the_machine_was_started_is_stale(model: Path, registry: Path) -> None:
    with tensorio.publish(model, "m"):
        manifest(registry, boot="another")
        with pytest.raises(tensorio.NotPublishedError, match="before the machine was started"):
            tensorio.attach("m")


def test_name_of_another_container_says_what_to_do(model: Path, registry: Path) -> None:
    with tensorio.publish(model, "m"):
        manifest(registry, namespace=1)
        with pytest.raises(tensorio.PublicationError, match=r"another pid namespace.*fileno.*persistent=True"):
            tensorio.attach("m")
        with pytest.raises(tensorio.NameTakenError, match=r"another pid namespace.*replace=True"):
            tensorio.publish(model, "m")


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a b", "x" * 101, "a\n", "ä"])
def test_name_that_is_no_name_is_refused(name: str, model: Path) -> None:
    for call in (
        lambda: tensorio.publish(model, name),
        lambda: tensorio.attach(name),
        lambda: tensorio.unpublish(name),
    ):
        with pytest.raises(ValueError, match="a name is"):
            call()


def test_segment_of_another_folder_is_not_opened(model: Path, registry: Path, tmp_path: Path) -> None:
    with tensorio.publish(model, "m", persistent=True):
        (file,) = registry.glob("*.segment")
        elsewhere = tmp_path / file.name
        shutil.move(file, elsewhere)
        manifest(registry, path=str(elsewhere))
        with pytest.raises(tensorio.NotPublishedError):
            tensorio.attach("m")


@linux
def test_file_that_is_a_device_or_a_pipe_is_not_opened(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, pipe = tmp_path / "m.safetensors", tmp_path / "pipe"
    tensorio.save({"w": np.ones(3)}, plain, durable=False)
    os.mkfifo(pipe)
    opened, really = [], os.open

    def watched(path: Any, *arguments: Any, **more: Any) -> int:
        opened.append(str(path))
        return really(path, *arguments, **more)

    monkeypatch.setattr(os, "open", watched)
    with tensorio.publish(plain, "m", persistent=True):
        manifest(registry, path=str(pipe))
        with pytest.raises(tensorio.PublicationError, match="expected a regular file"):
            tensorio.attach("m")
        assert str(pipe) not in opened
        assert "m.json" in opened
        tensorio.unpublish("m")


def test_links_are_not_followed(model: Path, registry: Path, tmp_path: Path) -> None:
    with tensorio.publish(model, "m", persistent=True):
        elsewhere = tmp_path / "m.json"
        shutil.move(registry / "m.json", elsewhere)
        (registry / "m.json").symlink_to(elsewhere)
        with pytest.raises(tensorio.PublicationError, match="it is a link"):
            tensorio.attach("m")
        (registry / "m.json").unlink()
        shutil.move(elsewhere, registry / "m.json")
        (file,) = registry.glob("*.segment")
        shutil.move(file, tmp_path / "segment")
        file.symlink_to(tmp_path / "segment")
        with pytest.raises(tensorio.PublicationError, match="can't be used"):
            tensorio.attach("m")


@pytest.mark.parametrize("what", ["link", "file", "open_to_all"])
def test_folder_that_is_not_ours_alone_is_refused(what: str, model: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    folder = tmp_path / "names"
    monkeypatch.setenv("TENSORIO_REGISTRY", str(folder))
    if what == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "real")
    elif what == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    for call in (lambda: tensorio.publish(model, "m"), lambda: tensorio.attach("m"), tensorio.published):
        with pytest.raises(tensorio.PublicationError, match="refused to use the folder of published names"):
            call()


def test_manifest_that_waits_for_a_writer_holds_up_nobody(registry: Path) -> None:
    os.mkfifo(registry / "m.json")
    with pytest.raises(tensorio.PublicationError, match="no regular file"):
        tensorio.attach("m")


# -------------------------------------------------------------------- other users

root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs the superuser")
NOBODY = 65534


def as_nobody(function: Any, *arguments: Any) -> Any:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    try:
        return function(*arguments)
    except tensorio.TensorIOError as error:
        return f"{type(error).__name__}: {error}"
    except OSError as error:
        return type(error).__name__


def first_value(name: str) -> float:
    return float(tensorio.attach(name)["w"][0])


@root
def test_other_user_is_refused_what_is_not_for_him(in_child: Any, model: Path) -> None:
    with tensorio.publish(model, "m"):
        assert in_child(as_nobody, first_value, "m") == "PermissionError"
        assert in_child(as_nobody, first_value, "0:m") == "PermissionError"
    with tensorio.publish(model, "kept", persistent=True):
        assert in_child(as_nobody, first_value, "root:kept") == "PermissionError"
        tensorio.unpublish("kept")


@root
@pytest.mark.parametrize("user", ["0", "root"])
def test_other_user_attaches_to_what_everybody_may_read(user: str, in_child: Any, model: Path, registry: Path) -> None:
    with tensorio.publish(model, "kept", persistent=True, mode=0o644):
        assert registry.stat().st_mode & 0o777 == 0o711
        assert in_child(as_nobody, first_value, f"{user}:kept") == 1
        assert in_child(as_nobody, tensorio.unpublish, f"{user}:kept") == "PermissionError"
        with tensorio.publish(model, "mine"):
            assert in_child(as_nobody, first_value, f"{user}:mine") == "PermissionError"
        tensorio.unpublish("kept")


@root
def test_other_user_can_not_reach_into_a_process(in_child: Any, model: Path) -> None:
    import pickle

    with tensorio.publish(model) as publication:
        raw = pickle.dumps(publication)
        assert in_child(as_nobody, pickle.loads, raw).startswith(
            "PublicationError: the publication can't be used: Perm"
        )


@root
def test_name_that_another_user_wrote_is_refused(model: Path, registry: Path) -> None:
    with tensorio.publish(model, "m"):
        os.chown(registry / "m.json", NOBODY, NOBODY)
        with pytest.raises(tensorio.PublicationError, match="belongs to user 65534, expected 0"):
            tensorio.attach("m")


@root
def test_folder_of_another_user_is_refused(model: Path, registry: Path) -> None:
    os.chown(registry, NOBODY, NOBODY)
    with pytest.raises(tensorio.PublicationError, match="belongs to user 65534, expected 0"):
        tensorio.publish(model, "m")
    with pytest.raises(ValueError, match="no user called"):
        tensorio.attach("no_such_user:m")


# ----------------------------------------------------------------------- arguments


@pytest.mark.parametrize(("options", "message"), [
    ({"persistent": True}, "needs a name"), ({"mode": 0o644}, "needs persistent=True"),
    ({"replace": True, "exist_ok": True}, "contradict"), ({"persistent": True, "mode": 0o044}, "its owner can read"),
    ({"persistent": True, "mode": 0o10644}, "a file's mode"),
])  # fmt: skip
def test_arguments_that_do_not_go_together(options: dict[str, Any], message: str, model: Path) -> None:
    name = None if "needs a name" in message else "m"
    with pytest.raises(ValueError, match=message):
        tensorio.publish(model, name, **options)


def test_name_to_publish_is_ones_own(model: Path) -> None:
    with pytest.raises(ValueError, match="this user's"):
        tensorio.publish(model, "0:m")


def test_attach_to_what_is_no_name() -> None:
    with pytest.raises(TypeError, match="expected a name"):
        tensorio.attach(3.5)  # type: ignore[arg-type]
