"""The first thing that an interpreter runs whose parent has the drop-in installed; see ``tensorio.dropin._children``.

Any interpreter may come here, of any version and with other packages: one that
can't import tensorio goes on without it, except the program that the drop-in was
asked for. Until something asks for torch or safetensors, tensorio is not imported.
"""
# mypy: ignore-errors

import os
import sys


class _OnDemand(object):  # noqa: UP004
    """Finder: installs the drop-in when it is needed, and leaves the answer to what that has put into place."""

    def find_spec(self, name, path=None, target=None):
        """Find the two packages."""
        if name not in ("torch", "safetensors") or not self._install():
            return None
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        return _first(finder.find_spec(name, path, target) for finder in finders)

    def find_distributions(self, context=None):
        """Find the distribution, for which no module need have been imported."""
        if getattr(context, "name", None) in (None, "safetensors") and self._install():
            for finder in list(sys.meta_path):
                if type(finder).__module__ == "tensorio.dropin._safetensors":
                    return finder.find_distributions(context)
        return iter(())

    def _install(self):
        if self not in sys.meta_path:
            return False  # another thread was here first, or this is that import itself
        sys.meta_path.remove(self)
        try:
            from tensorio.dropin import _children
        except ImportError:
            return False
        _children.join()
        return True


def _first(found):
    for spec in found:
        if spec is not None:
            return spec
    return None


def _start():
    program = os.environ.pop("TENSORIO_DROPIN_PROGRAM", None)
    if program is not None:
        try:
            from tensorio.dropin import _children
        except ImportError as error:
            sys.stderr.write("tensorio.dropin: %s can't import tensorio: %s\n" % (sys.executable, error))  # noqa: UP031
            sys.stderr.flush()
            os._exit(1)  # site would report any exception and go on
        _children.join(program)
    elif os.environ.get("TENSORIO_DROPIN") and sys.version_info >= (3, 10):
        sys.meta_path.insert(0, _OnDemand())


def _give_way():
    """Run the sitecustomize that would have been found without this one, in its place."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    this = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", None) != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this


_start()
_give_way()
