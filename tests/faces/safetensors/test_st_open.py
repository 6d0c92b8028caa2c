"""safe_open: what it takes, what it gives, whose memory that is, and what it costs."""

from __future__ import annotations

import io
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorio
import tensorio.safetensors as package
from tensorio import _served
from tensorio.safetensors import SafetensorError, _safe_open_handle, safe_open
from tensorio.safetensors.numpy import load, load_file, save, save_file

W = np.arange(20, dtype=np.float32).reshape(4, 5)
BACKENDS = ["mmap", "pread"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"w": W, "b": np.arange(3, dtype=np.int8)}, tmp_path / "m.safetensors", {"format": "np"})
    return tmp_path / "m.safetensors"


# ------------------------------------------------------------------------------ sources


def test_paths_buffers_and_file_objects_open(path: Path) -> None:
    data = path.read_bytes()
    sources: list[Any] = [str(path), path, data, bytearray(data), memoryview(data), io.BytesIO(data)]
    for source in sources:
        for backend in BACKENDS:
            if hasattr(source, "seek"):
                source.seek(0)
            with safe_open(source, "np", backend=backend) as f:
                assert f.metadata() == {"format": "np"}
                assert f.get_tensor("w").tolist() == W.tolist()
                assert f.get_slice("w")[1:3, -1].tolist() == W[1:3, -1].tolist()
                assert list(f.get_tensors()) == ["w", "b"]
    with path.open("rb") as file, safe_open(file, "np") as f:
        assert f.get_tensor("w").tolist() == W.tolist()


def test_a_handle_of_a_file_object_is_opened_by_its_name(path: Path) -> None:
    with path.open() as text, _safe_open_handle(text, "np") as f:
        assert f.keys() == ["b", "w"]
    with path.open("rb") as binary:
        binary.seek(9)
        with _safe_open_handle(binary, "np", "cpu", backend="pread") as f:
            assert f.get_tensor("b").tolist() == [0, 1, 2]
        assert binary.tell() == 9
    with open(os.fsencode(path), "rb") as named, _safe_open_handle(named, "np") as f:
        assert f.keys() == ["b", "w"]
    with _safe_open_handle(io.BytesIO(path.read_bytes()), "np") as f:
        assert len(f) == 2


def test_what_is_not_there_is_said_as_callers_know_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        safe_open(tmp_path / "none", "np")
    assert str(caught.value) == f"No such file or directory: {tmp_path / 'none'}"
    with pytest.raises(IsADirectoryError):
        safe_open(tmp_path, "np")
    with pytest.raises(SafetensorError, match="device"):
        safe_open(os.devnull, "np")
    with pytest.raises(TypeError, match="NoneType"):
        safe_open(None, "np")


def test_a_file_that_may_not_be_read_is_a_permission_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(name: Any, *_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionError, match=r"m\.safetensors"):
        safe_open(path, "np")


@pytest.mark.parametrize("framework", ["zz", "PT", None, 3])
def test_unknown_frameworks_are_refused(framework: Any, path: Path) -> None:
    with pytest.raises(SafetensorError, match=rf"^framework {framework} is invalid"):
        safe_open(path, framework)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", None])
def test_the_cpu_has_several_names(device: Any, path: Path) -> None:
    assert len(safe_open(path, "np", device)) == 2


@pytest.mark.parametrize(
    "device", ["meta", "auto", "CPU", "cuda:x", "cuda:-1", "cuda:", -1, 1.5, "mps:1", True, "cuda:\u0661", ""]
)
def test_unknown_devices_are_refused(device: Any, path: Path) -> None:
    with pytest.raises(SafetensorError, match=rf"^device {device} is invalid"):
        safe_open(path, "np", device)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps:0", 0, np.int64(0), "npu"])
def test_arrays_have_no_other_device(device: Any, path: Path) -> None:
    with pytest.raises(SafetensorError, match=rf"^Device {device} is not supported for framework numpy"):
        safe_open(path, "np", device)


def test_an_unknown_backend_is_refused(path: Path) -> None:
    for act in (lambda: safe_open(path, "np", backend="x"), lambda: load_file(path, backend="x")):
        with pytest.raises(SafetensorError, match=r'^backend "x" is invalid'):
            act()


# ------------------------------------------------------------------------------- handle


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_file_gives_nothing_and_takes_nothing_back(backend: str, path: Path) -> None:
    with safe_open(path, "np", backend=backend) as f:
        part, array = f.get_slice("w"), f.get_tensor("w")
    uses: list[Callable[[], Any]] = [
        f.keys, f.offset_keys, f.metadata, f.get_tensors, lambda: f.get_tensor("w"), lambda: f.get_slice("w"),
        lambda: len(f), lambda: "w" in f, lambda: list(f),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(SafetensorError, match=r"^File is closed$"):
            use()
    assert "closed" in repr(f)
    path.unlink()
    assert part[2].tolist() == W[2].tolist()
    assert part.get_shape() == [4, 5]
    assert array.tolist() == W.tolist()
    f.__exit__(None, None, None)  # once more does no harm


def test_a_handle_that_another_thread_closes_is_closed_and_nothing_else(path: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    wrong: list[BaseException] = []

    def ask(f: safe_open) -> None:
        try:
            while True:
                f.get_slice("w")
        except BaseException as error:
            if str(error) != "File is closed":
                wrong.append(error)

    try:
        for _ in range(100):
            f = safe_open(path, "np")
            thread = threading.Thread(target=ask, args=(f,))
            thread.start()
            f.__exit__(None, None, None)
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_a_handle_is_a_container_of_names(path: Path) -> None:
    f = safe_open(path, "np")
    assert (len(f), list(f), "w" in f, "x" in f) == (2, ["b", "w"], True, False)
    f.keys().clear()
    notes = f.metadata()
    assert notes is not None
    notes["format"] = "changed"
    assert (f.keys(), f.metadata()) == (["b", "w"], {"format": "np"})
    assert "2 tensors" in repr(f)
    assert repr(f.get_slice("w")) == "<slice of 'w': F32 [4, 5]>"


def test_a_missing_tensor_is_named_with_near_ones(path: Path) -> None:
    f = safe_open(path, "np")
    for get in (f.get_tensor, f.get_slice):
        with pytest.raises(SafetensorError, match=r"^File does not contain tensor ww; near names: 'w'") as caught:
            get("ww")
        assert isinstance(caught.value, KeyError)
        assert isinstance(caught.value, tensorio.TensorNotFoundError)
    with pytest.raises(SafetensorError, match=r"'x.*\.\.\.'"):
        f.get_tensor("x" * 5000)


def test_a_pickled_handle_opens_the_file_again(path: Path) -> None:
    f = safe_open(str(path), "np", backend="pread")
    g = pickle.loads(pickle.dumps(f))
    assert g.get_tensor("w").tolist() == W.tolist()
    assert type(g) is safe_open
    for other in (safe_open(path.read_bytes(), "np"), _closed(path)):
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(other)


def test_a_pickled_handle_opens_the_same_file_from_any_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path.parent / "sub").mkdir()
    monkeypatch.chdir(path.parent)
    f = safe_open(path.name, "np")
    save_file({"other": W}, path.parent / "sub" / path.name)
    monkeypatch.chdir(path.parent / "sub")
    assert pickle.loads(pickle.dumps(f)).keys() == ["b", "w"]


def _closed(path: Path) -> safe_open:
    with safe_open(path, "np") as f:
        return f


def test_errors_survive_a_pickle_and_come_from_a_module_that_can_be_imported(path: Path) -> None:
    import importlib

    assert importlib.import_module(SafetensorError.__module__).SafetensorError is SafetensorError
    assert issubclass(SafetensorError, tensorio.TensorIOError)
    with pytest.raises(SafetensorError) as caught:
        safe_open(path.read_bytes()[:-1], "np")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.code) == (type(caught.value), str(caught.value), "MetadataIncompleteBuffer")
    assert isinstance(again, tensorio.TruncatedError)


def test_acts_are_counted_once_each(path: Path) -> None:
    before = {name: list(entry) for name, entry in _served.calls.items()}
    load_file(path)
    with safe_open(path, "np") as f:
        f.get_tensors()
    save({"w": W})
    for name in ("safetensors.numpy.load_file", "safetensors.safe_open", "safetensors.numpy.save"):
        assert _served.calls[name][0] == before.get(name, [0])[0] + 1
    assert _served.calls["safetensors.safe_open"][1] >= path.stat().st_size


# ------------------------------------------------------------------------ whose memory


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_are_writable_and_change_neither_the_file_nor_one_another(backend: str, path: Path) -> None:
    before = path.read_bytes()
    f = safe_open(path, "np", backend=backend)
    first = f.get_tensor("w")
    first += 1000
    part = f.get_slice("w")[1:]
    part *= 0
    assert f.get_tensor("w").tolist() == f.get_slice("w")[...].tolist() == f.get_tensors()["w"].tolist() == W.tolist()
    everything = f.get_tensors()
    everything["w"] -= 5
    assert f.get_tensor("w").tolist() == W.tolist()
    assert first.tolist() == (W + 1000).tolist()
    assert path.read_bytes() == before


def test_all_tensors_at_once_change_nothing_for_later_ones(path: Path) -> None:
    with safe_open(path, "np") as f:
        everything = f.get_tensors()
        everything["w"][:] = 0
        assert f.get_tensor("w").tolist() == W.tolist()
        assert f.get_slice("w")[:].tolist() == W.tolist()


def test_loaded_bytes_are_a_copy(path: Path) -> None:
    data = bytearray(path.read_bytes())
    arrays = load(data)
    arrays["w"][:] = 7
    assert bytes(data) == path.read_bytes()
    data[-20:] = bytes(20)
    assert arrays["w"].tolist() == [[7] * 5] * 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", range(1, 9))
def test_arrays_are_aligned_wherever_they_are_in_the_file(shift: int, backend: str, tmp_path: Path) -> None:
    data = save({"w": W, "d": np.arange(4.0), "c": np.arange(3, dtype=np.complex64)})
    n = int.from_bytes(data[:8], "little")
    (tmp_path / "m").write_bytes((n + shift).to_bytes(8, "little") + data[8 : 8 + n] + b" " * shift + data[8 + n :])
    everything = load_file(tmp_path / "m", backend=backend)
    with safe_open(tmp_path / "m", "np", backend=backend) as f:
        for name, array in everything.items():
            for got in (array, f.get_tensor(name), f.get_slice(name)[:], load((tmp_path / "m").read_bytes())[name]):
                assert got.flags.aligned
                assert got.flags.writeable
                assert got.tolist() == load(data)[name].tolist()


def test_a_file_is_saved_over_while_it_is_loaded(path: Path) -> None:
    arrays = load_file(path)
    arrays["w"] += 1
    save_file(arrays, path)
    assert load_file(path)["w"].tolist() == arrays["w"].tolist() == (W + 1).tolist()
    torch = pytest.importorskip("torch")
    from tensorio.safetensors import torch as st

    tensors = st.load_file(path)
    tensors["w"].add_(1)
    st.save_file(tensors, path)
    assert torch.equal(st.load_file(path)["w"], torch.from_numpy(W + 2))
    assert torch.equal(tensors["w"], torch.from_numpy(W + 2))


def test_torch_tensors_have_storages_of_their_own(path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tensorio.safetensors import torch as st

    sources = (st.load_file(path), st.load(path.read_bytes()), st.load_file(path, backend="pread"))
    for tensors in sources:
        for tensor in tensors.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert st._is_complete(tensor)
        assert sorted(map(sorted, st._find_shared_tensors(tensors))) == [["b"], ["w"]]
        out = io.BytesIO()
        torch.save(tensors["b"], out)
        assert len(out.getvalue()) < 4000
    with safe_open(path, "pt", torch.device("cpu")) as f:
        f.get_tensor("w")[0, 0] = 99
        assert f.get_tensor("w")[0, 0] == 99  # one mapping per handle, as in the reference
    assert st.load_file(path)["w"][0, 0] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_for_another_device_is_moved_alone(backend: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tensorio.torch import _tensors

    moved = []

    def to_device(tensors: dict[str, Any], device: Any) -> dict[str, Any]:
        moved.extend((device, tensor.untyped_storage().nbytes()) for tensor in tensors.values())
        return tensors

    monkeypatch.setattr(_tensors, "to_device", to_device)
    with safe_open(path, "pt", device="cuda", backend=backend) as f:
        assert f.get_slice("w")[1:3].tolist() == W[1:3].tolist()
        assert f.get_slice("w")[:, 2].tolist() == W[:, 2].tolist()
        assert f.get_slice("w")[...].tolist() == W.tolist()
    assert moved == [("cuda", 40), ("cuda", 16), ("cuda", 80)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_types_that_torch_does_not_have_are_named(backend: str) -> None:
    pytest.importorskip("torch")
    from hexfile import st_entry, st_file

    data = st_file({"odd": st_entry("F6_E2M3", [4], 0, 3), "x": st_entry("U8", [1], 3, 4)}, b"1234")
    with safe_open(data, "pt", backend=backend) as f:
        assert f.get_tensor("x").tolist() == [0x34]
        for use in (f.get_tensors, lambda: f.get_tensor("odd"), lambda: f.get_slice("odd")[:]):
            with pytest.raises(SafetensorError, match=r"^Dtype not understood: F6_E2M3"):
                use()
    assert load(data)["odd"].tolist() == [0x31, 0x32, 0x33]


# --------------------------------------------------------------------------------- costs


def sparse(path: Path, nbytes: int) -> None:
    """A file of two large tensors that takes no room."""
    from hexfile import st_entry, st_file

    half = nbytes // 2
    head = st_file({"a": st_entry("F32", [half // 4], 0, half), "b": st_entry("F64", [half // 8], half, nbytes)}, b"")
    with path.open("wb") as f:
        f.write(head)
        f.truncate(len(head) + nbytes)


@pytest.mark.plain_build
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_loading_a_gibibyte_reads_no_payload(framework: str, tmp_path: Path, in_child: Any) -> None:
    if framework == "pt":
        pytest.importorskip("torch")
    sparse(tmp_path / "m", 1 << 30)

    def act() -> tuple[int, int]:
        with safe_open(tmp_path / "m", framework) as f:  # once, for what the first use costs
            f.get_slice("a")[:10]
        before = resource.getrusage(resource.RUSAGE_SELF)
        tensors = safe_open(tmp_path / "m", framework).get_tensors()
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert sum(t.nbytes for t in tensors.values()) == 1 << 30
        return after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt, after.ru_maxrss

    faults, _ = in_child(act)
    assert faults < 2000  # a page is 4 KiB: 262,144 would be all of them


@pytest.mark.plain_build
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_of_a_gibibyte_takes_the_memory_of_the_slice(backend: str, tmp_path: Path, in_child: Any) -> None:
    sparse(tmp_path / "m", 1 << 30)

    def act() -> int:
        part = safe_open(tmp_path / "m", "np", backend=backend).get_slice("a")
        part[:10]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert part[1 << 20 : (1 << 20) + 1000].shape == (1000,)
        if backend == "pread":  # of a mapping, the system may map 2 MiB around each element
            assert part[:: 1 << 20].shape == (128,)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert in_child(act) < 8 << 10  # KiB


def test_large_reads_let_other_threads_run(tmp_path: Path) -> None:
    save_file({"w": np.ones(64 << 20, np.uint8)}, tmp_path / "m")
    data = (tmp_path / "m").read_bytes()
    for act in (lambda: load(data), lambda: load_file(tmp_path / "m", backend="pread")):
        count = 0
        done = threading.Event()

        def work(act: Callable[[], Any] = act, done: threading.Event = done) -> None:
            act()
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        while not done.wait(0.0005):
            count += 1
        thread.join()
        assert count >= 2


def test_threads_share_a_handle(path: Path) -> None:
    f = safe_open(path, "np")
    failures: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        try:
            barrier.wait()
            for _ in range(50):
                array = f.get_tensor("w")
                array += 1  # nobody else sees it
                assert array.tolist() == (W + 1).tolist()
                assert f.get_slice("w")[1].tolist() == W[1].tolist()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


def test_one_tensor_and_all_at_once_never_share(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread maps the file for all tensors, another asks for one."""
    from tensorio.safetensors._file import File

    f = safe_open(path, "np")
    mapping, asked = threading.Event(), threading.Event()
    private = File.private

    def slow(file: File) -> Any:
        mapping.set()
        asked.wait(1)
        return private(file)

    monkeypatch.setattr(File, "private", slow)
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(f.get_tensors()))
    thread.start()
    assert mapping.wait(10)
    one: list[Any] = []
    other = threading.Thread(target=lambda: one.append(f.get_tensor("w")))
    other.start()
    other.join(0.2)
    asked.set()
    thread.join()
    other.join()
    assert not np.shares_memory(one[0], found[0]["w"])


def test_a_file_that_shrinks_is_an_error_for_reads_and_not_a_crash(path: Path) -> None:
    f = safe_open(path, "np", backend="pread")
    os.truncate(path, path.stat().st_size - 10)
    for use in (lambda: f.get_tensor("w"), lambda: f.get_slice("w")[:], f.get_tensors):
        with pytest.raises(SafetensorError, match=r"^Could not read from file: ") as caught:
            use()
        assert isinstance(caught.value, tensorio.TruncatedError)


def test_a_mapped_file_that_shrank_before_its_first_array_is_an_error(path: Path) -> None:
    f = safe_open(path, "np")
    os.truncate(path, path.stat().st_size - 10)
    for use in (lambda: f.get_tensor("w"), f.get_tensors):
        with pytest.raises(SafetensorError, match="10 bytes too short") as caught:
            use()
        assert isinstance(caught.value, tensorio.TruncatedError)
        assert caught.value.path == str(path)


def test_a_shape_that_numpy_does_not_have_is_an_error_of_this_package() -> None:
    header = b'{"w":{"dtype":"F32","shape":[0,4611686018427387904,8],"data_offsets":[0,0]}}'
    data = len(header).to_bytes(8, "little") + header
    with pytest.raises(SafetensorError, match="NumPy"):
        load(data)
    for backend in BACKENDS:
        f = safe_open(data, "np", backend=backend)
        for use in (lambda f=f: f.get_tensor("w"), lambda f=f: f.get_slice("w")[0:], f.get_tensors):
            with pytest.raises(SafetensorError, match="NumPy"):
                use()


def test_loaded_files_are_no_open_files(path: Path) -> None:
    """A process may load more files than it may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        kept = [load_file(path) for _ in range(200)]
        errors = []
        (path.parent / "bad").write_bytes(b"x" * 100)
        for _ in range(200):
            with pytest.raises(SafetensorError) as caught:
                load_file(path.parent / "bad")
            errors.append(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(tensors["w"].tolist() == W.tolist() for tensors in kept)
    assert len(errors) == 200


def test_the_package_imports_no_framework() -> None:
    code = (
        "import sys, tensorio.safetensors, tensorio.safetensors._safetensors_rust; "
        "print([m for m in ('torch', 'jax', 'tensorflow', 'paddle', 'safetensors') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "[]\n"


def test_torch_s_module_says_what_it_needs() -> None:
    code = """
import sys
sys.modules["torch"] = None
try:
    import tensorio.safetensors.torch
except ImportError as error:
    print(error.name, error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "torch tensorio.safetensors.torch needs torch: pip install 'tensorio[torch]'\n"


# ---------------------------------------------------------------------------- the surface


@pytest.mark.parametrize("module", ["", ".numpy", ".torch"])
def test_the_reference_s_names_are_all_there(module: str) -> None:
    import importlib

    reference = pytest.importorskip(f"safetensors{module}")
    if not getattr(reference, "__file__", None):
        pytest.skip("safetensors is not installed")
    if module == ".torch":
        pytest.importorskip("torch")
    ours = importlib.import_module(f"tensorio.safetensors{module}")
    imported = {"os", "sys", "defaultdict", "Any", "Dict", "List", "Optional", "Set", "Tuple", "Union"}
    names = {n for n in vars(reference) if not n.startswith("__") and not n.startswith("_float")} - imported
    assert names - set(dir(ours)) == set()
    assert package.__version__ == "0.8.0"


def test_an_address_is_a_file_name_like_any_other() -> None:
    """A name out of a request must not make a server fetch something."""
    fsspec = pytest.importorskip("fsspec")
    address = "memory://a.safetensors"
    with fsspec.open(address, "wb") as f:
        f.write(save({"a": np.arange(3)}))
    assert tensorio.load(address)["a"][2] == 2
    for act in (lambda: safe_open(address, "np"), lambda: load_file(address)):
        with pytest.raises(FileNotFoundError, match=f"No such file or directory: {address}"):
            act()
