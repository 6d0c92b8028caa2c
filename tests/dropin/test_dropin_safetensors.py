"""`safetensors` under the drop-in: whatever is imported, before or after, is ours."""

from __future__ import annotations

import pytest

from worlds import World

pytestmark = pytest.mark.plain_build


def test_imports_give_our_modules(world: World) -> None:
    out = world.code("""
        dropin.install()
        import safetensors, safetensors.torch
        from safetensors import safe_open, torch
        from safetensors.torch import load_file
        import tensorio.safetensors
        assert safetensors is tensorio.safetensors
        assert safetensors.torch is torch is tensorio.safetensors.torch
        print(safe_open("f"), load_file("f"), safetensors.__version__)
    """)
    assert out == "tensorio tensorio 0.8.0\n"


def test_a_missing_submodule_is_missing(world: World) -> None:
    out = world.code("""
        dropin.install()
        from importlib.util import find_spec
        print(find_spec("safetensors.nothing"))
        try:
            import safetensors.nothing
        except ModuleNotFoundError as error:
            print(error.name)
    """)
    assert out == "None\nsafetensors.nothing\n"


def test_specs_are_those_of_a_package(world: World) -> None:
    """`importlib.util.find_spec` is how packages ask whether safetensors is there."""
    out = world.code("""
        dropin.install()
        import importlib, sys
        from importlib.util import find_spec
        spec = find_spec("safetensors")
        assert "safetensors" not in sys.modules
        assert spec.name == "safetensors" and spec.has_location and spec.submodule_search_locations
        import safetensors, tensorio.safetensors
        assert find_spec("safetensors").origin == spec.origin == safetensors.__file__
        assert tensorio.safetensors.__spec__.name == "tensorio.safetensors"
        assert importlib.reload(safetensors) is safetensors
        print(find_spec("safetensors.torch").origin == sys.modules["safetensors.torch"].__file__
              if "safetensors.torch" in sys.modules else find_spec("safetensors.torch").name)
    """)
    assert out == "safetensors.torch\n"


def test_what_was_imported_before_is_replaced(world: World) -> None:
    world.write({
        "user.py": """
            import safetensors, safetensors.torch as st
            from safetensors import SafetensorError, safe_open as _open
            from safetensors.torch import load_file, only_there, _TYPES, os
            kept = [load_file]
        """
    })  # fmt: skip
    out = world.code("""
        import user, sys
        assert user._open("f") == user.load_file("f") == "original"
        dropin.install()
        import safetensors, tensorio.safetensors.torch
        assert user.safetensors is safetensors is tensorio.safetensors
        assert user.st is sys.modules["safetensors.torch"] is tensorio.safetensors.torch
        assert user.SafetensorError is safetensors.SafetensorError
        print(user._open("f"), user.load_file("f"), user.kept[0]("f"), user.only_there("f"), user._TYPES, user.os.name)
        dropin.uninstall()
        import safetensors
        assert user.safetensors is safetensors and user.st is safetensors.torch
        print(user._open("f"), user.load_file("f"), safetensors.__version__)
    """)
    assert out == "tensorio tensorio original original {} posix\noriginal original 0.1\n"


def test_uninstall_gives_later_imports_the_original(world: World) -> None:
    out = world.code("""
        dropin.install()
        import safetensors
        dropin.uninstall()
        import safetensors as again, importlib.metadata
        print(safetensors.__version__, again.__version__, importlib.metadata.version("safetensors"))
        dropin.uninstall()
    """)
    assert out == "0.8.0 0.1 0.1\n"


@pytest.mark.parametrize("where", ["world", "bare_world"])
def test_the_version_is_that_of_what_is_imported(where: str, request: pytest.FixtureRequest) -> None:
    """Packages ask for it before they use safetensors, installed or not."""
    out = request.getfixturevalue(where).code("""
        import importlib.metadata as metadata
        def listed():
            return sum(d.metadata["Name"] == "safetensors" for d in metadata.distributions())
        before = listed()
        dropin.install()
        import safetensors
        assert metadata.version("safetensors") == safetensors.__version__
        distribution = metadata.distribution("safetensors")
        assert distribution.metadata["Name"] == "safetensors"
        assert not distribution.requires and not distribution.files
        print(before > 0, listed() == max(before, 1))
    """)
    assert out == f"{where == 'world'} True\n"


def test_without_safetensors_installed(bare_world: World) -> None:
    out = bare_world.code("""
        import importlib.metadata, importlib.util
        try:
            importlib.metadata.version("safetensors")
        except importlib.metadata.PackageNotFoundError:
            print("not installed")
        dropin.install()
        assert importlib.util.find_spec("safetensors")
        print("safetensors" in importlib.metadata.packages_distributions())
        from safetensors import safe_open
        print(safe_open("f"))
        dropin.uninstall()
        try:
            import safetensors
        except ModuleNotFoundError as error:
            print(error)
    """)
    assert out == "not installed\nTrue\ntensorio\nNo module named 'safetensors'\n"


def test_what_cannot_be_replaced_changes_nothing(world: World) -> None:
    world.write({"faces/safetensors/torch.py": "import absent"})
    out = world.code("""
        import safetensors.torch, sys
        before = dict(sys.modules), list(sys.meta_path)
        try:
            dropin.install()
        except ImportError as error:
            print(error)
        import safetensors
        print(safetensors.safe_open("f"), sys.meta_path == before[1])
    """)
    assert out == "No module named 'absent'\noriginal True\n"


def test_left_alone_on_request(world: World) -> None:
    out = world.code("""
        dropin.install(safetensors=False)
        import safetensors, torch
        print(safetensors.safe_open("f"), torch.load("f"))
        dropin.install()
        import safetensors
        print(safetensors.safe_open("f"), torch.load("f"))
    """)
    assert out == "original tensorio\ntensorio tensorio\n"


def test_install_from_many_threads(world: World) -> None:
    out = world.code("""
        import threading
        start, got = threading.Barrier(8), []
        def work(i):
            start.wait()
            dropin.install()
            from safetensors import safe_open
            import torch
            got.append((safe_open("f"), torch.load("f")))
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        import sys
        print(set(got), sum(type(f).__module__.startswith("tensorio.dropin") for f in sys.meta_path))
    """)
    assert out == "{('tensorio', 'tensorio')} 2\n"
