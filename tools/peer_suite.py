"""Run the test suite of the safetensors package against `tensorio.safetensors`, and beside it against safetensors.

The tests are taken from the source release (0.8.0) that pip finds, when they are
needed; nothing of them is kept here. They run twice in this environment, in
folders of their own: unchanged, and with `safetensors` meaning
`tensorio.safetensors` (see ``peer_swap.py``). A test that passes on the
reference and not on ours is a failure, and so is a test that does not run.

    python tools/peer_suite.py [FILE OF TESTS ...]

PEER_SDIST names a source release that is there already. Files whose packages
(jax, flax, tensorflow, h5py, paddle, mlx) are not installed are left out.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path

PACKAGE, VERSION = "safetensors", "0.8.0"
TOOLS = Path(__file__).resolve().parent
MINUTES = 20

# What each file of tests needs besides pytest and NumPy. The rest needs nothing.
NEEDS = {
    "test_simple": ("torch",),
    "test_pt_comparison": ("torch",),
    "test_pt_model": ("torch",),
    "test_pread_backend": ("torch",),
    "test_multithreaded": ("torch",),
    "test_handle": ("fsspec",),
    "test_flax_comparison": ("jax", "flax"),
    "test_tf_comparison": ("tensorflow", "h5py"),
    "test_paddle_comparison": ("paddle",),
    "test_mlx_comparison": ("mlx",),
}

# pip asks a source release for its name, and this one would want a Rust compiler to answer.
STUB = f"""
import pathlib
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "{PACKAGE}-{VERSION}.dist-info"
    made = pathlib.Path(folder, name)
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\\nName: {PACKAGE}\\nVersion: {VERSION}\\n")
    return name
"""


def source_release(folder: Path) -> Path:
    """Return the source release, downloaded into `folder` by pip, from wherever that is set up to."""
    if given := os.environ.get("PEER_SDIST"):
        return Path(given)
    stub = folder / "stub"
    stub.mkdir()
    (stub / "maturin.py").write_text(STUB)
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE, "--no-build-isolation",
        f"{PACKAGE}=={VERSION}", "-d", str(folder),
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(stub)})
    return folder / f"{PACKAGE}-{VERSION}.tar.gz"


def unpack_tests(release: Path, folder: Path) -> None:
    """Unpack the tests of the Python package as ``folder/tests``."""
    inside = f"{PACKAGE}-{VERSION}/bindings/python/tests/"
    with tarfile.open(release) as archive:
        for member in archive.getmembers():
            if member.isfile() and member.name.startswith(inside) and ".." not in member.name:
                target = folder / "tests" / member.name.removeprefix(inside)
                target.parent.mkdir(parents=True, exist_ok=True)
                source = archive.extractfile(member)
                assert source is not None
                target.write_bytes(source.read())
    if not (folder / "tests").is_dir():
        raise SystemExit(f"{release} has no {inside}")
    (folder / "tests" / "data").mkdir(exist_ok=True)


def runnable(folder: Path, wanted: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the files of tests that can run here, and why others can't."""
    run, left = [], {}
    for path in sorted((folder / "tests").glob("test_*.py")):
        missing = [name for name in NEEDS.get(path.stem, ()) if importlib.util.find_spec(name) is None]
        if missing:
            left[path.stem] = f"needs {', '.join(missing)}"
        elif not wanted or path.stem in wanted or path.name in wanted:
            run.append(f"tests/{path.name}")
    return run, left


def started(folder: Path, files: list[str], swap: bool) -> subprocess.Popen[str]:
    """Start pytest on the files, in `folder`."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "-c", os.devnull,
        "--rootdir", str(folder), "-o", "addopts=", "--junitxml", str(folder / "results.xml"),
        *(["-p", "peer_swap"] if swap else []), *files,
    ]  # fmt: skip
    paths = [str(TOOLS), *(os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_MODULE_LOADING": "LAZY"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def outcomes(folder: Path) -> dict[str, str]:
    """Return "passed", "failed" or "skipped" per test."""
    report = folder / "results.xml"
    if not report.exists():
        return {}
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found


def table(theirs: dict[str, str], ours: dict[str, str], left: dict[str, str]) -> list[str]:
    """Print counts per file; return the tests that pass on the reference only."""
    worse = [test for test, outcome in theirs.items() if outcome == "passed" and ours.get(test) != "passed"]
    print(f"\n{'file':26}{'tests':>6} {'reference':>22} {'tensorio':>22}")
    files = sorted({test.split(".")[1] for test in [*theirs, *ours]})
    for name in [*files, "all"]:
        cells = []
        for results in (theirs, ours):
            here = [o for test, o in results.items() if name in ("all", test.split(".")[1])]
            cells.append(f"{here.count('passed')} passed, {here.count('skipped')} skipped")
        total = sum(name in ("all", test.split(".")[1]) for test in theirs)
        print(f"{name:26}{total:>6} {cells[0]:>22} {cells[1]:>22}")
    for name, why in left.items():
        print(f"{name:26}{'':>6} left out: {why}")
    return worse


def main(wanted: list[str]) -> int:
    """Run both and compare; the exit status."""
    with tempfile.TemporaryDirectory(prefix="peer-suite-") as name:
        top = Path(name)
        release = source_release(top)
        runs = {}
        for side in ("reference", "tensorio"):
            unpack_tests(release, top / side)
        files, left = runnable(top / "reference", wanted)
        for side in ("reference", "tensorio"):
            runs[side] = started(top / side, files, swap=side == "tensorio")
        output = {side: run.communicate(timeout=60 * MINUTES)[0] for side, run in runs.items()}
        theirs, ours = outcomes(top / "reference"), outcomes(top / "tensorio")
        worse = table(theirs, ours, left)
        if worse or not theirs:
            print("\nas run on tensorio:", textwrap.indent(output["tensorio"][-8000:], "  "), sep="\n")
            if not theirs:
                print("\nas run on the reference:", textwrap.indent(output["reference"][-4000:], "  "), sep="\n")
            print(f"\n{len(worse)} tests pass on the reference and not on tensorio: {', '.join(worse)}")
            return 1
        print(f"\nevery test that passes on {PACKAGE} {VERSION} passes on tensorio")
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
