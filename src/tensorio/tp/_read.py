"""Whatever a user may call rules: rules, a preset's name, a file, a mapping or list."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from tensorio.errors import HeaderError, LimitError, error_context, escaped
from tensorio.storage.opening import open_storage
from tensorio.tp._presets import preset, presets
from tensorio.tp._rules import Rules

__all__ = ["config_of", "rules_of"]

# Bytes of a file of rules, or of a model's config.json; real ones have some KiB.
FILE_MAX = 4 << 20


def rules_of(source: Any, config: Mapping[str, Any] | None = None) -> Rules:
    """Return the rules that something stands for.

    Parameters
    ----------
    source : Rules, str, os.PathLike, mapping or iterable
        A str that is the name of a preset means that; ``./llama`` is a file. A
        file is JSON if it is called ``.json``, else lines; see `tensorio.tp`.
    config : mapping, optional
        The model's ``config.json``.

    Raises
    ------
    ValueError
        A rule is wrong, or no preset is called so and there is no such file.
    HeaderError
        The file is not JSON, or not text.
    """
    if isinstance(source, Rules):
        return source
    if isinstance(source, str) and source in presets():
        return preset(source, config)
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if isinstance(source, str) and not os.path.exists(path) and os.path.basename(path) == path:
            raise ValueError(f"no preset is called {escaped(path)} ({', '.join(presets())}), and no file")
        return _of_file(path, config)
    return Rules(source, config)


def _of_file(path: str, config: Mapping[str, Any] | None) -> Rules:
    try:
        if not path.lower().endswith(".json"):
            return Rules.parse(_text(path), config)
        value = _json(path)
        return Rules(value["rules"] if isinstance(value, dict) and set(value) == {"rules"} else value, config)
    except ValueError as error:
        if isinstance(error, HeaderError | LimitError):
            raise
        raise HeaderError(str(error), path=path) from None


def config_of(source: Any) -> dict[str, Any]:
    """Return a model's configuration: a mapping, or the path of its ``config.json``."""
    value = source if isinstance(source, Mapping) else _json(os.fspath(source))
    if not isinstance(value, Mapping):
        raise HeaderError("expected a JSON object, as a model's config.json is", path=os.fspath(source))
    return dict(value)


def _json(path: str) -> Any:
    text = _text(path)
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise LimitError("JSON: nested too deep", path=path) from None
    except ValueError as error:
        raise HeaderError(f"JSON: {error}", path=path) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {escaped(next(key for key in keys if keys.count(key) > 1))} occurs twice")
    return out


def _text(path: str) -> str:
    storage, _, name = open_storage(path)
    try:
        with error_context(path=name):
            if storage.nbytes > FILE_MAX:
                raise LimitError(f"expected at most {FILE_MAX} bytes of text, found {storage.nbytes}")
            return bytes(storage.view()).decode()
    except UnicodeDecodeError as error:
        raise HeaderError("expected text in UTF-8", path=name, offset=error.start) from None
    finally:
        storage.close()
