"""``${NAME}`` in a file: values that differ between hosts, and secrets that must not stand in it.

A value becomes one text or number and never a part of the file's structure. What a variable with a telling name holds
is a ``Secret``, which only sections that are not written into the model or its record may use. What came of any other
is shown as it was referred to, unless ``show_variables`` names it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sparkdl.pipeline.file.problems import Path, nearest
from sparkdl.pipeline.file.tree import Filled, typed
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

    def mistake(self, text: str, path: Path) -> str:
        """What is wrong with the variables that a text names, or with their place; empty if nothing is."""
        references = _references(text)
        for reference in references:
            name = reference["name"]
            if name is None:
                return "has a ${ that names no variable: write ${NAME}, ${NAME:-default}, or $${ for the text itself"
            if not self.values.get(name) and reference["default"] is None:
                near = nearest(name, self.values, cutoff=0.8)
                state = "empty" if name in self.values else "not set"
                remedy = f"write ${{{near}}}" if near and near != name else f"set it, or write ${{{name}:-default}}"
                return f"takes {name} from the environment, where it is {state}: {remedy}"
        secrets = [reference["name"] for reference in references if self._is_secret(reference["name"])]
        if secrets and not any(path[: len(section)] == section for section in _MAY_HOLD_SECRETS):
            places = ", ".join(".".join(section) for section in _MAY_HOLD_SECRETS)
            return (
                f"is written into the run's record, and {secrets[0]} looks like a secret: these may stand in {places}; "
                f"if it is none, name it in show_variables: [{secrets[0]}]"
            )
        return ""

    def filled(self, text: str) -> Filled:
        """Return a text of the file with the values of the variables that it names."""
        names = [reference["name"] for reference in _references(text)]
        filled = _REFERENCE.sub(self._value, text)
        if any(map(self._is_secret, names)):
            return Filled(Secret(filled, text), filled, text, public=False)
        return Filled(typed(filled) if names else filled, filled, text, public={*names} <= {*self.harmless})

    def _is_secret(self, name: str) -> bool:
        return bool(self.values.get(name)) and name not in (*_FOLDERS, *self.harmless) and tells_a_secret(name)

    def _value(self, reference: re.Match[str]) -> str:
        if reference["escaped"]:
            return reference[0][1:]
        name = reference["name"]
        value = self.values.get(name)
        if value and name not in self.harmless:
            self.used[name] = value
        return value or reference["default"] or ""


def _references(text: str) -> list[re.Match[str]]:
    return [reference for reference in _REFERENCE.finditer(text) if not reference["escaped"]]
