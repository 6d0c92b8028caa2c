"""Processes that a program starts: they follow, and one line says what all of them did."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from worlds import World

pytestmark = pytest.mark.plain_build

LOAD = "import safetensors, torch; print(safetensors.safe_open('f'), torch.load('f'))"
LINE = "tensorio: served {n} safetensors.safe_open ({size}), {n} torch.load ({more})\n"


def test_a_subprocess_follows(world: World) -> None:
    done = world.python("-c", f"""
import subprocess, sys
from tensorio import dropin
dropin.install()
{LOAD}
sys.stdout.flush()
subprocess.run([sys.executable, "-c", "import sys; assert 'tensorio' not in sys.modules; {LOAD}"], check=True)
subprocess.run([sys.executable, "-c", {f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LOAD!r}])"!r}])
""")  # fmt: skip
    assert done.stdout == "tensorio tensorio\n" * 3
    assert done.stderr == LINE.format(n=3, size="3.0 kB", more="7.5 MB")
    assert list(world.tmp.iterdir()) == []


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing(world: World, method: str) -> None:
    world.write({
        "program.py": """
            import multiprocessing, sys
            from tensorio import dropin
            dropin.install()  # in the children again: their main module is this one
            def work(i):
                import safetensors, torch
                return safetensors.safe_open("f"), torch.load("f")
            if __name__ == "__main__":
                work(0)
                with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
                    print(set(pool.map(work, range(5), 1)))
        """
    })  # fmt: skip
    # The fork server's socket lies among temporary files, and its address has 108 bytes at most.
    done = world.python("program.py", method, TMPDIR=tempfile.gettempdir())
    assert done.stdout == "{('tensorio', 'tensorio')}\n"
    assert done.stderr == LINE.format(n=6, size="6.0 kB", more="15.0 MB")


def test_a_child_that_is_killed_has_said_what_it_did(world: World) -> None:
    done = world.python("-c", """
import os, signal, subprocess, sys
from tensorio import dropin
dropin.install()
code = "import os, signal, torch; torch.load('f'); os.kill(os.getpid(), signal.SIGKILL)"
assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
if os.fork() == 0:
    import torch
    torch.load("f")
    sys.exit(0)  # as a worker of a pre-fork server ends: what is registered for the exit runs
os.wait()
""")  # fmt: skip
    assert done.stderr == "tensorio: served 2 torch.load (5.0 MB)\n"


def test_a_child_that_outlives_the_program_says_nothing(world: World) -> None:
    done = world.python("-W", "ignore", "-c", """
import os, subprocess, sys
from tensorio import dropin
dropin.install()
code = "import sys, torch; sys.stdin.read(); print(torch.load('f'), flush=True)"
subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
""")  # fmt: skip
    assert done.stdout == "tensorio\n"
    assert done.stderr == "tensorio: served nothing\n"
    assert list(world.tmp.iterdir()) == []


def test_not_asked_for(world: World) -> None:
    done = world.python("-c", f"""
import os, subprocess, sys
before = dict(os.environ)
from tensorio import dropin
dropin.install(children=False, report=False)
assert os.environ == before
dropin.install(report=False)
assert os.environ != before
dropin.uninstall()
assert os.environ == before
dropin.install(children=False, report=False)
subprocess.run([sys.executable, "-c", {LOAD!r}])
""")  # fmt: skip
    assert done.stdout == "original original\n"
    assert done.stderr == ""


def test_children_of_what_was_asked_for(world: World) -> None:
    done = world.python("-c", f"""
import subprocess, sys
from tensorio import dropin
dropin.install(torch=False)
subprocess.run([sys.executable, "-c", {LOAD!r}])
""")  # fmt: skip
    assert done.stdout == "tensorio original\n"
    assert done.stderr == "tensorio: served 1 safetensors.safe_open (1.0 kB)\n"


def test_the_environments_own_sitecustomize_runs(world: World) -> None:
    """It has the name and the place that it has without us, and our folder is no longer in the way."""
    out = world.code("""
        import os, subprocess, sys
        dropin.install()
        os.environ["PYTHONPATH"] += os.pathsep  # a last empty part, which is the current folder
        code = "import os, sys, sitecustomize; print(sitecustomize.own_site, sitecustomize.__file__, sys.path)"
        print(subprocess.check_output([sys.executable, "-c", code], text=True))
    """)
    assert out.startswith(f"True {world.folder / 'sitecustomize.py'} ")
    assert "/_site" not in out


def test_a_broken_sitecustomize_is_reported_as_ever(world: World) -> None:
    world.write({"other/sitecustomize.py": "import absent"})
    done = world.python("-c", """
import os, subprocess, sys
code = "print(1)"
env = dict(os.environ, PYTHONPATH="other")
plain = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
from tensorio import dropin
dropin.install(report=False)
env = dict(os.environ, PYTHONPATH=os.environ["PYTHONPATH"].split(os.pathsep)[0] + os.pathsep + "other")
ours = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
assert ours.stdout == plain.stdout == "1\\n"
print(ours.stderr, plain.stderr, sep="=")
""")  # fmt: skip
    ours, plain = done.stdout.split("=", 1)
    assert "absent" in ours
    assert ours.strip() == plain.strip()


def test_a_child_without_tensorio_goes_on_without(world: World) -> None:
    out = world.code(f"""
        import os, subprocess, sys
        dropin.install()
        here = os.environ["PYTHONPATH"].split(os.pathsep)[0]
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([here, os.getcwd()]))
        code = "import sys; sys.modules['tensorio'] = None; import importlib.metadata as m; " + {LOAD!r} + \\
            "; print(m.version('safetensors'))"
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
        subprocess.run([sys.executable, "-I", "-c", "import sys; print('sitecustomize' in dir(), sys.flags.isolated)"])
    """)
    assert out == "original original\n0.1\nFalse 1\n"


def test_a_child_asks_for_the_version_first(bare_world: World) -> None:
    out = bare_world.code("""
        import subprocess, sys
        dropin.install()
        for code in (
            "from importlib.metadata import version; print(version('safetensors'))",
            "from importlib.util import find_spec; print(find_spec('safetensors').name)",
            "from importlib.metadata import packages_distributions as p; print(p()['safetensors'])",
            "from importlib.metadata import version; version('numpy'); import sys; print('tensorio' in sys.modules)",
        ):
            subprocess.run([sys.executable, "-c", code], check=True)
    """)
    assert out == "0.8.0\nsafetensors\n['safetensors']\nFalse\n"


def test_the_site_folder_works_for_any_python() -> None:
    """Its one file runs in interpreters of every age: it must be of the plainest syntax."""
    import ast

    from tensorio.dropin import _children

    [path] = [p for p in __import__("pathlib").Path(_children.SITE).iterdir() if p.suffix == ".py"]
    tree = ast.parse(path.read_text(), feature_version=(3, 7))
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.JoinedStr | ast.AnnAssign | ast.NamedExpr)]
    assert subprocess.run([sys.executable, str(path)], timeout=30).returncode == 0
