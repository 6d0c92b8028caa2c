"""``torch.load`` and ``torch.save`` under the drop-in: whenever torch is imported."""

from __future__ import annotations

import pytest

from worlds import World

pytestmark = pytest.mark.plain_build


def test_torch_imported_later(world: World) -> None:
    out = world.code("""
        import sys
        dropin.install()
        assert "torch" not in sys.modules
        import torch
        from torch import load, save
        from torch.serialization import load as there
        print(torch.load("f"), torch.save({}, "f"), torch.hub._fetch("f"))
        assert load is there is torch.load
        dropin.uninstall()
        print(torch.load("f"), torch.save({}, "f"), torch.hub._fetch("f"), load("f"))
    """)
    assert out == "tensorio tensorio tensorio\noriginal original original tensorio\n"


def test_torch_imported_before(world: World) -> None:
    world.write({"user.py": "from torch import load as _read, save"})
    out = world.code("""
        import torch, user
        dropin.install()
        print(torch.load("f"), torch.serialization.load("f"), user._read("f"), user.save({}, "f"))
        dropin.uninstall()
        print(torch.load("f"), torch.serialization.load("f"), user._read("f"), user.save({}, "f"))
    """)
    assert out == "tensorio tensorio tensorio tensorio\noriginal original original original\n"


def test_finders_of_old_are_passed_over(world: World) -> None:
    """Of before Python 3.4, or for distributions only; an old six has one."""
    out = world.code("""
        import sys, warnings
        warnings.simplefilter("ignore", ImportWarning)  # the import system's own
        class Old:
            def find_module(self, name, path=None): return None
        sys.meta_path.insert(0, Old())
        dropin.install()
        import torch
        print(torch.load("f"))
    """)
    assert out == "tensorio\n"


def test_what_is_passed_on_reaches_the_original(world: World) -> None:
    out = world.code("""
        import torch
        dropin.install()
        print(torch.load("f", weights_only=False))
    """)
    assert out == "original\n"


def test_the_module_keeps_its_loader(world: World) -> None:
    out = world.code("""
        import importlib, inspect
        dropin.install()
        import torch
        from importlib.machinery import SourceFileLoader
        for loader in (torch.__loader__, torch.__spec__.loader):
            assert type(loader) is SourceFileLoader and "exec_module" not in vars(loader)
        assert "import torch.hub" in inspect.getsource(torch)
        assert importlib.reload(torch) is torch
        print(torch.load("f"))
    """)
    assert out == "tensorio\n"


def test_an_import_that_fails_is_tried_again(world: World) -> None:
    world.write({"torch/hub.py": "import os\nif 'BROKEN' in os.environ: raise ImportError('no library')"})
    out = world.code(
        """
        import os
        dropin.install()
        try:
            import torch
        except ImportError as error:
            print(error)
        del os.environ["BROKEN"]
        import torch
        print(torch.load("f"))
        """,
        BROKEN="1",
    )
    assert out == "no library\ntensorio\n"


def test_what_the_program_put_there_stays(world: World) -> None:
    out = world.code("""
        import functools, torch, warnings
        torch.load = functools.partial(torch.load, weights_only=False)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            dropin.install()
        print(torch.load("f"), torch.save({}, "f"))
        print(seen[0].message)
    """)
    assert out == (
        "original tensorio\n"
        "tensorio.dropin: torch.load is not torch's own but functools.partial, and is left as it is; "
        "call tensorio.dropin.install() before it is replaced\n"
    )


def test_what_the_program_puts_there_later_stays(world: World) -> None:
    out = world.code("""
        dropin.install()
        import functools, torch
        mine = torch.load = functools.partial(torch.load, weights_only=False)
        dropin.install()
        dropin.uninstall()
        print(torch.load is mine, torch.serialization.load("f"))
    """)
    assert out == "True original\n"


def test_without_our_part_torch_stays_as_it_is(world: World) -> None:
    world.write({"faces/torch.py": "raise ImportError('tensorio.torch needs torch 9')"})
    out = world.code("""
        import warnings
        dropin.install()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            import torch
        print(torch.load("f"), seen[0].message)
        dropin.uninstall()
        try:
            dropin.install()
        except ImportError as error:
            print(error)
        import sys
        print([f for f in sys.meta_path if type(f).__module__.startswith("tensorio.dropin")])
    """)
    assert out == (
        "original tensorio.dropin: torch.load and torch.save stay torch's own: tensorio.torch needs torch 9\n"
        "tensorio.torch needs torch 9\n[]\n"
    )


def test_install_within_the_import_of_torch(world: World) -> None:
    world.write({"torch/hub.py": "from tensorio import dropin; dropin.install()"})
    out = world.code("""
        try:
            import torch
        except RuntimeError as error:
            print(error)
    """)
    assert out == ("tensorio.dropin.install() was called from within the import of torch: call it before or after\n")


def test_left_alone_on_request(world: World) -> None:
    out = world.code("""
        dropin.install(torch=False)
        import safetensors, torch
        print(safetensors.safe_open("f"), torch.load("f"))
    """)
    assert out == "tensorio original\n"
