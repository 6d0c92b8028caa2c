"""``python -m tensorio.dropin``: a program runs as it does without, and a line is added."""

from __future__ import annotations

import signal

import pytest

from worlds import World

pytestmark = pytest.mark.plain_build

RUN = ("-m", "tensorio.dropin")
ABOUT = """
import json, sys
main = sys.modules["__main__"]
print(json.dumps([sys.argv, sys.path[:2], sys.flags[:], sys._xoptions, __name__, main.__dict__ is globals(),
                  getattr(main, "__file__", None), getattr(main.__spec__, "name", None), sys.stdin.read()]))
"""
LOADS = "import safetensors, torch; safetensors.safe_open('f'); torch.load('f'); torch.load('f', weights_only=False)"
LINE = (
    "tensorio: served 1 safetensors.safe_open (1.0 kB), 1 torch.load (2.5 MB); "
    "passed on to torch: 1 torch.load(weights_only=False)\n"
)


@pytest.mark.parametrize(
    "target",
    [
        ["about.py", "--quiet", "x y", "-m"],
        ["folder/about.py"],
        ["-m", "about", "1"],
        ["-mpackage", "1"],
        ["-m", "package.about"],
        ["-c", ABOUT, "-c", "2"],
        ["folder"],
    ],
    ids=" ".join,
)
def test_a_program_sees_what_it_ever_sees(world: World, target: list[str]) -> None:
    world.write(dict.fromkeys(("about.py", "folder/about.py", "folder/__main__.py", "package/about.py"), ABOUT))
    world.write({"package/__init__.py": "", "package/__main__.py": ABOUT})
    options = ["-u", "-X", "utf8", "-O"]
    plain = world.python(*options, *target, stdin="typed")
    ours = world.python(*options, *RUN, *target, stdin="typed")
    assert ours.stdout == plain.stdout
    assert "typed" in plain.stdout
    assert plain.stderr == ""
    assert ours.stderr == "tensorio: served nothing\n"


def test_a_program_on_standard_input(world: World) -> None:
    done = world.python(*RUN, "-", "x", stdin=f"import sys; print(sys.argv); {LOADS}")
    assert done.stdout == "['-', 'x']\n"
    assert done.stderr == LINE


def test_options_before_the_m(world: World) -> None:
    done = world.python("-uOm", "tensorio.dropin", "-c", "import sys; print(sys.flags.optimize, sys.orig_argv[1:])")
    assert done.stdout == "1 ['-W', 'error', '-uO', '-c', 'import sys; print(sys.flags.optimize, sys.orig_argv[1:])']\n"


def test_the_line(world: World) -> None:
    assert world.python(*RUN, "-c", LOADS).stderr == LINE
    assert world.python(*RUN, "--quiet", "-c", LOADS).stderr == ""
    assert world.python(*RUN, "--no-torch", "-c", LOADS).stderr == "tensorio: served 1 safetensors.safe_open (1.0 kB)\n"
    done = world.python(*RUN, "--no-safetensors", "-c", LOADS)
    assert done.stderr == LINE.replace("1 safetensors.safe_open (1.0 kB), ", "")
    assert world.python(*RUN, "--no-safetensors", "--no-torch", "-c", LOADS).stderr == "tensorio: served nothing\n"


def test_no_line_without_standard_error(world: World) -> None:
    """It is not for standard output, which is the program's."""
    for code in ("import sys; sys.stderr = None", "import sys; sys.stderr.close()"):
        done = world.python("-m", "tensorio.dropin", "-c", code)
        assert (done.stdout, done.stderr) == ("", "")


def test_without_a_folder_for_temporary_files(world: World) -> None:
    out = world.code("""
        import os, tempfile, warnings
        def nowhere(**_): raise FileNotFoundError("no usable temporary directory")
        tempfile.mkdtemp = nowhere
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dropin.install()
        import safetensors
        print(safetensors.safe_open("f"), "TENSORIO_DROPIN" in os.environ, "no line" in str(caught[0].message))
    """)
    assert out == "tensorio True True\n"


def test_one_line_for_a_program_within_a_program(world: World) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-m', 'tensorio.dropin', '-c', {LOADS!r}])"
    assert world.python(*RUN, "-c", code).stderr == LINE


def test_exit_codes(world: World) -> None:
    world.python(*RUN, "-c", "raise SystemExit(3)", status=3)
    assert "tensorio: served nothing" in world.python(*RUN, "-c", "import sys; sys.exit('bye')", status=1).stderr
    world.python(*RUN, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)", status=-signal.SIGTERM)


def test_tracebacks_are_the_programs(world: World) -> None:
    world.write({"fails.py": "def f():\n    raise ValueError('no')\nf()\n"})
    plain = world.python("fails.py", status=1)
    ours = world.python(*RUN, "fails.py", status=1)
    assert ours.stderr == plain.stderr + "tensorio: served nothing\n"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "nothing to run: expected -m module, -c code or a script"),
        (["--quiet"], "nothing to run: expected -m module, -c code or a script"),
        (["-m"], "nothing to run: expected -m module, -c code or a script"),
        (["--no-torhc", "x.py"], "no option --no-torhc"),
        (["-u", "x.py"], "no option -u"),
    ],
    ids=" ".join,
)
def test_wrong_use(world: World, arguments: list[str], says: str) -> None:
    done = world.python(*RUN, *arguments, status=2)
    assert done.stderr.startswith(f"tensorio.dropin: {says}\n\nusage: ")
    assert done.stdout == ""


def test_help(world: World) -> None:
    assert world.python(*RUN, "--help").stdout.startswith("usage: python -m tensorio.dropin ")


def test_an_interpreter_that_cannot_be_followed(world: World) -> None:
    done = world.python("-S", *RUN, "-c", LOADS, status=2)
    assert "can't install itself in an interpreter run with -S, -E or -I" in done.stderr


def test_a_program_that_cannot_import_tensorio(world: World) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'tensorio'\", name='tensorio')"
    world.write({"other/safetensors.py": "", "other/tensorio.py": missing})  # in front of one that is installed
    code = """
import os, sys
from tensorio.dropin import _children
env = dict(os.environ)
_children.environment(env, torch=True, safetensors=True, report=None, program="report")
env["PYTHONPATH"] = _children.SITE + os.pathsep + "other"
os.execve(sys.executable, [sys.executable, "-c", "print('ran')"], env)
"""
    done = world.python("-c", code, status=1)
    assert done.stdout == ""
    assert done.stderr.startswith("tensorio.dropin: ")
    assert "can't import tensorio: No module named 'tensorio'" in done.stderr
