"""``${NAME}`` in a file: values that differ between hosts, and secrets that must not stand in it.

A value becomes one text or number and never a part of the file's structure. What a variable with a telling name holds
is a ``Secret``, which only sections that are not written into the model or its record may use. What came of any other
is shown as it was referred to, unless ``show_variables`` names it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from sparkdl.pipeline.file.problems import Problems, nearest
from sparkdl.pipeline.file.tree import Listing, Node, Scalar, Section, Unknown, typed
from sparkdl.pipeline.spec.base import Secret

_REFERENCE = re.compile(r"\$(?P<escaped>\$)?\{((?P<name>[A-Za-z_]\w*)(:-(?P<default>[^}]*))?\})?")
_SECRET = re.compile(
    r"secret|token(?!i[sz])|passw(?:or)?d|passphrase|pwd|credential|(?:[\W_]|(?-i:[a-z](?=P)))pass$"
    r"|signature|authorization|auth[\W_]?header|bearer|(?:^|[\W_])(?:pat|sas|sig|jwt)(?:$|[\W_])"
    r"|[a-z0-9][\W_]?key\d*(?:$|[\W_]?id$)|(?:api|access|account|private|shared)[\W_]?key|fs\.azure\.sas\.",
    re.IGNORECASE,
)
_ABOUT_ONE = re.compile(
    r"(?:^|_)(?:max|min|num|n|total)_(?:\w+_)?tokens$|[\W_](?:columns?|col|field|counts?|limit|length|size|type|dim)$",
    re.IGNORECASE,
)
"""``MAX_TOKENS``, ``TOKEN_COLUMN``: what holds a number, or the name of a column."""
_FOLDERS = ("PWD", "OLDPWD")
"""Variables of every shell."""
_MAY_HOLD_SECRETS = (
    ("source", "options"),
    ("source", "arguments"),
    ("spark", "conf"),
    ("notify",),
    ("publish", "mlflow"),
)


def tells_a_secret(name: str) -> bool:
    """Whether what a name stands for is nobody else's business: ``API_TOKEN``, ``fs.s3a.secret.key``."""
    return _SECRET.search(name) is not None and _ABOUT_ONE.search(name) is None


@dataclass
class Environment:
    """The variables that a file may refer to.

    Attributes:
        values: by name.
        harmless: names of those whose values may be shown.
        used: of the others, those that the file does refer to, with their values.
    """

    values: Mapping[str, str]
    harmless: Collection[str] = ()
    used: dict[str, str] = field(default_factory=dict)

    def filled_in(self, node: Node, problems: Problems, path: tuple[str, ...] = ()) -> Node:
        """Return the tree below ``path`` with the values of the variables that it names."""
        if isinstance(node, Section):
            entries = {name: self.filled_in(entry, problems, (*path, name)) for name, entry in node.entries.items()}
            return replace(node, entries=entries)
        if isinstance(node, Listing):
            items = (self.filled_in(item, problems, (*path, str(index))) for index, item in enumerate(node.items))
            return replace(node, items=tuple(items))
        return self._scalar(node, problems, path) if isinstance(node.value, str) and "${" in node.value else node

    def _scalar(self, node: Scalar, problems: Problems, path: tuple[str, ...]) -> Scalar:
        text = str(node.value)
        references = [reference for reference in _REFERENCE.finditer(text) if not reference["escaped"]]
        filled = _REFERENCE.sub(self._value, text)
        if not references:
            return replace(node, value=filled)
        secrets = [reference["name"] for reference in references if self._is_secret(reference["name"])]
        sentence = next(filter(None, (self._missing(reference) for reference in references)), "")
        if not sentence and secrets and not any(path[: len(section)] == section for section in _MAY_HOLD_SECRETS):
            places = ", ".join(".".join(section) for section in _MAY_HOLD_SECRETS)
            sentence = (
                f"is written into the run's record, and {secrets[0]} looks like a secret: these may stand in {places}; "
                f"if it is none, name it in show_variables: [{secrets[0]}]"
            )
        if sentence:
            problems.add(node.at, f"{'.'.join(path)}={text!r} {sentence}")
            return replace(node, value=Unknown(text))
        if secrets:
            return replace(node, value=Secret(filled, text), shown=repr(text))
        value = typed(filled)
        if {reference["name"] for reference in references} <= {*self.harmless}:
            return replace(node, value=value, shown=f"{filled!r} (of {text})", filled=filled)
        shown = repr(text) if isinstance(value, str) else f"{filled!r} (of {text})"
        return replace(node, value=value, shown=shown, filled=filled, reference=text)

    def _is_secret(self, name: str | None) -> bool:
        harmless = (*_FOLDERS, *self.harmless)
        value = name is not None and name not in harmless and self.values.get(name)
        return bool(value) and tells_a_secret(str(name))

    def _value(self, reference: re.Match[str]) -> str:
        if reference["escaped"]:
            return reference[0][1:]
        name = reference["name"] or ""
        value = self.values.get(name)
        if value and name not in self.harmless:
            self.used[name] = value
        return value or reference["default"] or ""

    def _missing(self, reference: re.Match[str]) -> str:
        """What is wrong with a reference; empty if it has a value."""
        name = reference["name"]
        if name is None:
            return "has a ${ that names no variable: write ${NAME}, ${NAME:-default}, or $${ for the text itself"
        values = self.values
        if values.get(name) or reference["default"] is not None:
            return ""
        near = nearest(name, values, cutoff=0.8)
        state = "empty" if name in values else "not set"
        remedy = f"write ${{{near}}}" if near and near != name else f"set it, or write ${{{name}:-default}}"
        return f"takes {name} from the environment, where it is {state}: {remedy}"
