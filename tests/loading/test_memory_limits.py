"""What may be taken of memory: trees of files as kernels and container engines lay them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorio.checkpoint import _prefetch
from tensorio.system import memory

GIB = 1 << 30


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   33554432 kB\n"
V2 = "42 30 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def test_without_groups_it_is_what_the_system_has(tmp_path: Path) -> None:
    assert memory.available(lay(tmp_path, {"proc/meminfo": MEMINFO})) == 32 * GIB


def test_where_nothing_tells_it_is_no_limit(tmp_path: Path) -> None:
    assert memory.available(tmp_path) == memory.NO_LIMIT


def test_limit_of_a_group_above_counts(tmp_path: Path) -> None:
    """A slice has 8 GiB, of which 6 are in use; the service below it has no limit of its own."""
    root = lay(tmp_path, {
        "proc/meminfo": MEMINFO, "proc/self/mountinfo": V2, "proc/self/cgroup": "0::/ml.slice/serve.service\n",
        "sys/fs/cgroup/ml.slice/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/ml.slice/memory.current": f"{6 * GIB}\n",
        "sys/fs/cgroup/ml.slice/memory.stat": f"anon {5 * GIB}\nfile {GIB}\ninactive_file 0\n",
        "sys/fs/cgroup/ml.slice/serve.service/memory.max": "max\n",
        "sys/fs/cgroup/ml.slice/serve.service/memory.current": f"{GIB}\n",
    })  # fmt: skip
    assert memory.available(root) == 2 * GIB


def test_page_cache_of_the_group_can_be_taken_back(tmp_path: Path) -> None:
    """A container that has read a model shows itself full; what fills it is the model."""
    root = lay(tmp_path, {
        "proc/meminfo": MEMINFO, "proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{16 * GIB}\n", "sys/fs/cgroup/memory.current": f"{16 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon {4 * GIB}\ninactive_file {10 * GIB}\nactive_file {2 * GIB}\n",
    })  # fmt: skip
    assert memory.available(root) == 10 * GIB


@pytest.mark.parametrize("inside", ["/", "/docker/4fe1"])
def test_version_1_in_a_container(inside: str, tmp_path: Path) -> None:
    """The mount may show the whole tree, or the container's part of it, under the same path."""
    folder = "sys/fs/cgroup/memory" + ("/docker/4fe1" if inside == "/" else "")
    root = lay(tmp_path, {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "12:pids:/docker/4fe1\n5:memory:/docker/4fe1\n1:name=systemd:/docker/4fe1\n0::/\n",
        "proc/self/mountinfo": f"33 31 0:30 {inside} /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n"
                               f"35 31 0:32 {inside} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        f"{folder}/memory.limit_in_bytes": f"{4 * GIB}\n", f"{folder}/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{folder}/memory.stat": "cache 0\ntotal_inactive_file 1048576\n",
    })  # fmt: skip
    assert memory.available(root) == GIB + (1 << 20)


def test_more_in_use_than_allowed_is_nothing_left(tmp_path: Path) -> None:
    root = lay(tmp_path, {
        "proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "2000\n",
    })  # fmt: skip
    assert memory.available(root) == 0


@pytest.mark.parametrize("text", ["", "garbage", "0::/../..\n", "0::\n"])
def test_odd_files_are_no_limit_and_no_error(text: str, tmp_path: Path) -> None:
    if text == "garbage":
        text += "::x\n"
    root = lay(tmp_path, {"proc/self/cgroup": text, "proc/self/mountinfo": V2, "sys/fs/cgroup/memory.max": "what\n"})
    assert memory.available(root) == memory.NO_LIMIT


@pytest.mark.parametrize(("left", "asked", "window"), [
    (40 * GIB, None, 10 * GIB), (40 * GIB, GIB, GIB), (40 * GIB, 20 * GIB, 10 * GIB), (0, None, _prefetch.LEAST),
    (0, GIB, _prefetch.LEAST), (40 * GIB, 1, _prefetch.LEAST),
])  # fmt: skip
def test_window_is_within_a_quarter_of_what_is_left(
    left: int, asked: int | None, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: left)
    assert _prefetch.window_of(asked) == window
