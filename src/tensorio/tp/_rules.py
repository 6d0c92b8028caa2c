"""What becomes of which tensors: patterns over names, in order."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensorio.errors import TensorMismatchError, escaped
from tensorio.tp._patterns import Pattern

__all__ = ["ACTIONS", "DEFAULTS", "Resolved", "Rule", "Rules"]

ACTIONS = ("cut", "replicate", "rank0", "skip")
DEFAULTS = ("error", "replicate", "skip")
# Longer names are nobody's; matching may cost the square of their length.
NAME_MAX = 1024
LISTED = 5  # names in a message
# Of one tensor; those in use have three. Each rank has a piece of each, and a group has up to 1024 ranks.
SECTIONS_MAX = 1024
_FIELDS = ("dim", "sections", "heads", "pad_to", "optional")


@dataclass(frozen=True)
class Rule:
    """What becomes of the tensors whose names fit a pattern.

    Parameters
    ----------
    pattern : str
        See `tensorio.tp`.
    action : {"cut", "replicate", "rank0", "skip"}
        Cut along `dim`; whole on every rank; whole on rank 0 only; nowhere.
    dim : int
        Dimension to cut, from the end if negative.
    sections : tuple of int
        The dimension is several tensors in a row, of these sizes or of sizes in
        these ratios, each to be cut by itself; a rank gets its parts in a row.
    heads : tuple of int
        How many heads each section is made of: cuts are between heads, and with
        fewer heads than ranks each head goes to as many ranks as it takes. The
        sizes of sections, too, if `sections` is not given.
    pad_to : int
        Zeros are added behind the dimension until its size is a multiple of this
        and of the number of ranks; 0 for none.
    optional : bool
        Whether it may match no tensor.

    Raises
    ------
    ValueError
        The parts do not fit together.
    """

    pattern: str
    action: str = "cut"
    dim: int = 0
    sections: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    pad_to: int = 0
    optional: bool = False
    matcher: Pattern = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "matcher", Pattern(self.pattern))
        if self.action not in ACTIONS:
            raise ValueError(
                f"{self._named} expected one of {', '.join(ACTIONS)} or a dimension, found {self.action!r}"
            )
        numbers = (self.dim, self.pad_to, *self.sections, *self.heads)
        if any(type(n) is not int for n in numbers) or self.pad_to < 0 or min((*self.sections, *self.heads, 1)) < 1:
            raise ValueError(f"{self._named} expected positive whole numbers of sections, heads and pad_to")
        if max(len(self.sections), len(self.heads)) > SECTIONS_MAX:
            raise ValueError(f"{self._named} expected at most {SECTIONS_MAX} sections")
        if self.action != "cut" and (self.dim or self.sections or self.heads or self.pad_to):
            raise ValueError(f"{self._named} dim, sections, heads and pad_to are for cuts only, not for {self.action}")
        if self.pad_to and (self.sections or self.heads):
            raise ValueError(f"{self._named} a dimension of sections or heads can't be padded")
        if self.sections and self.heads and len(self.sections) != len(self.heads):
            raise ValueError(f"{self._named} {len(self.sections)} sections and {len(self.heads)} numbers of heads")

    @property
    def _named(self) -> str:
        return f"rule {escaped(self.pattern)}:"

    @property
    def what(self) -> str:
        """What stands behind the pattern in a rules file."""
        words = [str(self.dim) if self.action == "cut" else self.action]
        words += [
            f"{key}={','.join(map(str, value))}" for key in ("sections", "heads") if (value := getattr(self, key))
        ]
        words += [f"pad_to={self.pad_to}"] if self.pad_to else []
        return " ".join([*words, "optional"] if self.optional else words)

    def __str__(self) -> str:
        return f"{self.pattern} = {self.what}"

    @classmethod
    def of(cls, pattern: str, what: object, config: Mapping[str, Any] | None = None) -> Rule:
        """Make a rule out of what stands for one in a mapping or file.

        Parameters
        ----------
        what : int, str, None or mapping
            A dimension; text as in a rules file; None for "replicate"; or the
            fields by name, with an ``action`` if it is not a cut.
        config : mapping, optional
            Where ``$key`` is looked up, ``$a.b`` one level down.
        """
        if isinstance(what, str):
            return _of_text(pattern, what, config)
        if what is None:
            return cls(pattern, "replicate")
        if isinstance(what, Mapping):
            unknown = set(what) - {"action", *_FIELDS}
            if unknown:
                raise ValueError(f"rule {escaped(pattern)}: no field is called {escaped(min(unknown, key=str))}")
            lists = {key: _numbers(pattern, what[key], config) for key in ("sections", "heads") if key in what}
            return cls(pattern, **{**what, **lists})
        if type(what) is not int:
            raise ValueError(f"rule {escaped(pattern)}: expected a dimension or words, found {type(what).__name__}")
        return cls(pattern, dim=what)


class Resolved(NamedTuple):
    """Which rule is whose.

    Attributes
    ----------
    rules : dict of str to Rule
        By tensor name; those without one have that of the default.
    counts : dict of Rule to int
        How many tensors each rule took.
    unmatched : tuple of str
        Names that no rule fits.
    """

    rules: dict[str, Rule]
    counts: dict[Rule, int]
    unmatched: tuple[str, ...]


class Rules(Sequence[Rule]):
    """Rules in order; the first that fits a name counts.

    Parameters
    ----------
    rules : iterable of Rule, or of pairs of a pattern and what `Rule.of` takes; or a mapping of such
    config : mapping, optional
        The model's ``config.json``, for rules that take a number from it.

    Raises
    ------
    ValueError
        A rule is wrong, a pattern occurs twice, or a number is not in `config`.
    """

    def __init__(self, rules: Iterable[Any] | Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        self._rules = tuple(r if isinstance(r, Rule) else Rule.of(*_pair(r), config) for r in pairs)
        seen: set[str] = set()
        for rule in self._rules:
            if rule.pattern in seen:
                raise ValueError(f"two rules have the pattern {escaped(rule.pattern)}")
            seen.add(rule.pattern)

    @classmethod
    def parse(cls, text: str, config: Mapping[str, Any] | None = None) -> Rules:
        """Read the lines of a rules file; see `tensorio.tp`."""
        pairs = []
        for number, line in enumerate(text.splitlines(), 1):
            body = line.partition("#")[0].strip()
            if not body:
                continue
            pattern, equals, what = body.partition("=")
            if not equals or not pattern.strip() or not what.strip():
                raise ValueError(f"line {number}: expected 'pattern = dimension or word', found {escaped(body)}")
            pairs.append((pattern.strip(), what.strip()))
        return cls(pairs, config)

    def __len__(self) -> int:
        return len(self._rules)

    def __getitem__(self, i: Any) -> Any:
        return self._rules[i]

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and self._rules == other._rules

    def __hash__(self) -> int:
        return hash(self._rules)

    def __str__(self) -> str:
        return "".join(f"{rule}\n" for rule in self)

    def __repr__(self) -> str:
        return f"<{len(self)} rules, {self.digest[:12]}>"

    @property
    def digest(self) -> str:
        """SHA-256 of the rules as text, in hexadecimal digits."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def match(self, fqn: str) -> Rule | None:
        """Return the rule for a name; None if no rule fits."""
        if len(fqn) > NAME_MAX:
            raise TensorMismatchError(f"rules are for names of at most {NAME_MAX} characters", record=fqn)
        return next((rule for rule in self._rules if rule.matcher.fits(fqn)), None)

    def resolve(self, fqns: Iterable[str], default: str = "error") -> Resolved:
        """Find each tensor's rule.

        Parameters
        ----------
        fqns : iterable of str
        default : {"error", "replicate", "skip"}
            What becomes of tensors that no rule fits.

        Raises
        ------
        TensorMismatchError
            Tensors without a rule, or rules without a tensor that are not optional.
        """
        if default not in DEFAULTS:
            raise ValueError(f"default= is one of {', '.join(DEFAULTS)}, not {default!r}")
        names = list(fqns)
        found = {name: self.match(name) for name in names}
        unmatched = tuple(name for name, rule in found.items() if rule is None)
        if unmatched and default == "error":
            raise TensorMismatchError(
                f"no rule fits {len(unmatched)} of {len(names)} tensors: {_listed(unmatched)}; "
                "add rules for them, or set default='replicate'"
            )
        counts = dict.fromkeys(self._rules, 0)
        for rule in found.values():
            if rule is not None:
                counts[rule] += 1
        self._require_all(counts, names)
        others = Rule("**", "replicate" if default == "error" else default)
        return Resolved({name: rule or others for name, rule in found.items()}, counts, unmatched)

    def _require_all(self, counts: dict[Rule, int], names: list[str]) -> None:
        idle = [rule for rule, count in counts.items() if not count and not rule.optional]
        if not idle:
            return
        hidden = [rule.pattern for rule in idle if any(map(rule.matcher.fits, names))]
        why = f" (earlier rules take what {_listed(hidden)} fits)" if hidden else ""
        raise TensorMismatchError(
            f"{len(idle)} of {len(self)} rules match no tensor: {_listed([r.pattern for r in idle])}{why}; "
            "correct them, or mark them as optional"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(escaped(name) for name in names[:LISTED]) + more


def _pair(item: Any) -> tuple[str, Any]:
    """A rule of a list: a pair, or (as in JSON) an object with its pattern inside."""
    if isinstance(item, Mapping):
        fields = dict(item)
        pattern: Any = fields.pop("pattern", None)
        what: Any = fields
    else:
        try:
            pattern, what = item
        except (TypeError, ValueError):
            pattern = what = None
    if not isinstance(pattern, str):
        raise ValueError("expected each rule to be a Rule, a pattern and what becomes of it, or fields with a pattern")
    return pattern, what


# ----------------------------------------------------------------------------- text


def _of_text(pattern: str, text: str, config: Mapping[str, Any] | None) -> Rule:
    first, *words = text.split()
    fields: dict[str, Any] = {"dim": int(first)} if re.fullmatch(r"-?[0-9]{1,4}", first) else {"action": first}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _FIELDS[1:] or bool(equals) == (key == "optional") or key in fields:
            raise ValueError(f"rule {escaped(pattern)}: expected {', '.join(_FIELDS[1:])}, found {escaped(word)}")
        fields[key] = True if key == "optional" else _numbers(pattern, value.split(","), config)
    if "pad_to" in fields:
        (fields["pad_to"],) = fields["pad_to"] if len(fields["pad_to"]) == 1 else (-1,)
    return Rule(pattern, **fields)


def _numbers(pattern: str, values: Any, config: Mapping[str, Any] | None) -> tuple[int, ...]:
    items = values if isinstance(values, list | tuple) else (values,)
    return tuple(_number(pattern, item, config) for item in items)


def _number(pattern: str, item: Any, config: Mapping[str, Any] | None) -> int:
    if isinstance(item, str) and item.startswith("$"):
        return _looked_up(pattern, item[1:].split("|"), config)
    if isinstance(item, str) and re.fullmatch(r"[0-9]{1,18}", item):
        return int(item)
    if type(item) is int:
        return item
    raise ValueError(f"rule {escaped(pattern)}: expected whole numbers, found {escaped(item)}")


def _looked_up(pattern: str, keys: list[str], config: Mapping[str, Any] | None) -> int:
    for key in keys:
        value: Any = config
        for step in key.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        if type(value) is int:
            return value
    raise ValueError(
        f"rule {escaped(pattern)}: needs the number {escaped(' or '.join(keys))} of the model's config.json, which "
        f"{'is not given' if config is None else 'has none'}; give it as config={{{keys[0]!r}: ...}}"
    )
