"""Extension modules; everything else is in pyproject.toml.

No per-file SIMD flags: kernels carry target attributes and are chosen at run
time, so one build runs on every CPU of its architecture.

Switches (environment): TENSORIO_DEBUG=1 builds with -O0 -g and line tracing,
TENSORIO_QUICK=1 with -O0 in a third of the time, for what is only tested,
TENSORIO_SANITIZE=1 with address and undefined-behaviour sanitizers, =thread with
the thread sanitizer, TENSORIO_COVERAGE=1 with counters for gcov.
"""

import os
import sys
from glob import glob

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("TENSORIO_DEBUG") == "1"
QUICK = os.environ.get("TENSORIO_QUICK") == "1"
SANITIZE = os.environ.get("TENSORIO_SANITIZE", "").replace("0", "").replace("1", "address,undefined")
COVERAGE = os.environ.get("TENSORIO_COVERAGE") == "1"

if sys.platform == "win32":
    compile_args, link_args = ["/std:c11", "/O2"], []
else:
    compile_args = [
        "-std=c11",
        *(["-O0", "-g"] if DEBUG else ["-O0" if QUICK else "-O3", "-g0"]),
        "-fvisibility=hidden",
    ]
    compile_args += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
    link_args = []
if SANITIZE:
    compile_args += ["-O1", "-g", f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    link_args += [f"-fsanitize={SANITIZE}"]
if COVERAGE:
    compile_args += ["-O0", "-g", "--coverage"]
    link_args += ["--coverage"]

HEADERS = sorted([*glob("csrc/*.h"), *glob("csrc/host/*.h")])
CSRC = sorted(set(glob("csrc/*.c")) - {"csrc/tensor_ops.c"})  # which _unpickler has


def extension(name: str, c_sources: list[str]) -> Extension:
    """Declare one Cython module and the C files linked into it."""
    return Extension(
        f"tensorio.{name}",
        [f"src/tensorio/{name}.pyx", *c_sources],
        include_dirs=["csrc", numpy.get_include()],
        depends=HEADERS,  # of a .pxd or .pxi, cythonize knows
        define_macros=[
            ("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"),
            *([("CYTHON_TRACE_NOGIL", "1")] if DEBUG else []),
        ],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


setup(
    options={"build_ext": {"parallel": os.cpu_count()}},
    ext_modules=cythonize(
        [
            extension("_core", CSRC),
            extension("_arrays", []),
            extension("_dlpack", []),
            extension("_source", []),
            extension("_host", sorted(glob("csrc/host/*.c"))),
            extension("_unpickler", ["csrc/tensor_ops.c"]),
            extension("_pickler", []),
        ],
        compiler_directives={
            "language_level": 3,
            "freethreading_compatible": True,
            "auto_pickle": False,
            "autotestdict": False,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "embedsignature": True,
            "embedsignature.format": "python",
            "linetrace": DEBUG,
        },
    ),
)
