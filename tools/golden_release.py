"""Make the golden files of one torch release, in an environment that is thrown away.

    python tools/golden_release.py 1.4.0 PYTHON

downloads the release's wheel for the interpreter PYTHON from the package index, runs `make_golden.py` under both,
and packs what it wrote into tests/golden/<release>.tar.xz. No GPU library is downloaded: a wheel that links them
gets libraries of the same names whose functions only say that there is no device, which is enough to save tensors.

The environment is at the same place each time, as TorchScript notes where its sources were.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = Path("/tmp/golden")
SYSTEM = ["libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libgomp.so.1", "libpthread.so.0",
          "ld-linux-x86-64.so.2", "librt.so.1", "libdl.so.2"]  # fmt: skip
PLATFORMS = ["manylinux1_x86_64", "manylinux2014_x86_64", "manylinux_2_28_x86_64"]
TAGS = """
import sys, sysconfig
tag = (sysconfig.get_config_var("SOABI") or "cpython-27mu").split("-")[1]
print("%d.%d.%d cp%s" % (sys.version_info[:3] + (tag,)))
"""
GPU = re.compile(r"lib(cu|nv|nccl)")


def run(*command: str | Path, **options: object) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run([str(c) for c in command], check=True, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    out: str = done.stdout
    return out


def install(release: str, python: str) -> None:
    """Lay the wheel and what it needs, GPU libraries and compilers aside, under WORK."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    version, tag = run(python, "-c", TAGS).split()
    wanted_by = ["--python-version", version, "--implementation", "cp", "--abi", tag]
    wanted_by += [word for platform in PLATFORMS for word in ("--platform", platform)]
    fetch = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", WORK)
    run(*fetch, *wanted_by, f"torch=={release}")
    wheel = next(WORK.glob(f"torch-{release}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".a") and ("/include/" not in name or "THNN" in name or "THCUNN" in name):
                archive.extract(name, WORK / "site")  # some releases read these two headers at import
        facts = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        wanted = Parser().parsestr(archive.read(facts).decode()).get_all("Requires-Dist") or []
    wheel.unlink()
    names = {w for w in wanted if not w.startswith(("nvidia", "triton", "cuda")) and "extra ==" not in w}
    names |= {"numpy<2" if tuple(map(int, release.split(".")[:2])) < (2, 3) else "numpy"}
    if tag in ("cp27mu", "cp36m"):  # whose pip takes what is too new for it; torch 1.0 names none of these
        names = {"numpy<1.17" if tag == "cp27mu" else "numpy<1.20", "typing_extensions<4.2", "future", "six"}
        names |= {"typing", "enum34"} if tag == "cp27mu" else set()
    run(python, "-m", "pip", "install", "-q", "--target", WORK / "deps", *sorted(names))


def symbols(library: Path, which: str) -> set[str]:
    """Names that a library defines, or wants."""
    found = subprocess.run(["nm", "-D", which, library], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return {line.split()[-1].split("@")[0] for line in found.stdout.splitlines() if line.strip()}


def stand_in(folder: Path) -> None:
    """Make the GPU libraries that torch's link but that are not there."""
    folder.mkdir()
    libraries = [*(WORK / "site").glob("torch/lib/*.so*"), *(WORK / "site").glob("torch/_C*.so")]
    system = [p for name in SYSTEM for p in Path("/lib/x86_64-linux-gnu").glob(name)]
    wanted = set().union(*(symbols(p, "--undefined-only") for p in libraries))
    wanted -= set().union(*(symbols(p, "--defined-only") for p in [*libraries, *system]))
    needed = {n for p in libraries for n in re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-d", p))}
    missing = sorted(n for n in needed - {p.name for p in libraries} if GPU.match(n))
    names = sorted(n for n in wanted if re.fullmatch(r"(?!_?Py)[A-Za-z_]\w*", n))
    source = folder / "none.c"
    source.write_text("".join(f"int {n}(void) {{ return 100; }}\n" for n in names))  # 100 is cudaErrorNoDevice
    build = ("gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o")
    run(*build, folder / "libnodevice.so", source, "-Wl,-soname,libnodevice.so")
    source.write_text("")
    for name in missing:
        run(*build, folder / name, source, f"-Wl,-soname,{name}", "-Wl,--no-as-needed", f"-L{folder}", "-lnodevice")


def pack(folder: Path, archive: Path) -> None:
    """Put a folder's files into an archive, without times and owners."""
    with tarfile.open(archive, "w:xz", preset=9, format=tarfile.USTAR_FORMAT) as out:
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            entry = tarfile.TarInfo(path.name)
            entry.size = len(data)
            out.addfile(entry, io.BytesIO(data))


def main(release: str, python: str) -> None:
    """Install, write, pack, clean up."""
    install(release, python)
    stand_in(WORK / "libraries")
    out = WORK / "out"
    out.mkdir()
    for script in ("make_golden.py", "golden_kinds.py", "golden_files.py"):
        shutil.copy(HERE / script, WORK)
    paths = {"PYTHONPATH": f"{WORK}/site:{WORK}/deps", "LD_LIBRARY_PATH": str(WORK / "libraries")}
    print(run(python, "make_golden.py", out, cwd=WORK, env={**os.environ, **paths, "PYTHONDONTWRITEBYTECODE": "1"}))
    old = "" if (out / "protocol_4.pt").exists() else ".py2"
    archive = HERE.parent / "tests" / "golden" / f"{release}{old}.tar.xz"
    pack(out, archive)
    print(archive, archive.stat().st_size)
    shutil.rmtree(WORK)


if __name__ == "__main__":
    main(*sys.argv[1:])
