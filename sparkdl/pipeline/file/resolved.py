"""The values of a file as JSON: for the keys of a run's steps, and, without secrets, for its record.

In the record a text that came from the environment is shown as it was referred to, ``${NAME}``; settings of other
systems (``options``, ``conf``) are shown where their names are known to be harmless, and hidden else; within texts user
and password of an address, what ``name=value`` calls a secret, and the literals of SQL are hidden.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sparkdl.pipeline.file.environment import tells_a_secret
from sparkdl.pipeline.file.problems import Path
from sparkdl.pipeline.spec.base import Secret

HIDDEN = "(hidden)"

_FREE = (("source", "options"), ("spark", "conf"))
"""Fields whose keys are other systems' names."""
_ARGUMENTS = (("source", "arguments"), ("transform", "arguments"))
_SQL = (("source", "query"), ("transform", "sql"))
_OPTIONS = frozenset(
    """
    sep delimiter encoding charset quote escape comment header inferSchema preferDate enforceSchema nullValue nanValue
    ignoreLeadingWhiteSpace ignoreTrailingWhiteSpace positiveInf negativeInf emptyValue dateFormat timestampFormat
    timestampNTZFormat enableDateTimeParsingFallback maxColumns maxCharsPerColumn mode columnNameOfCorruptRecord
    multiLine charToEscapeQuoteEscaping samplingRatio locale lineSep unescapedQuoteHandling compression codec timeZone
    primitivesAsString prefersDecimal allowComments allowUnquotedFieldNames allowSingleQuotes allowNumericLeadingZeros
    allowBackslashEscapingAnyCharacter allowUnquotedControlChars allowNonNumericNumbers dropFieldIfAllNull rowTag
    rootTag attributePrefix valueTag excludeAttribute ignoreNamespace wholeText mergeSchema datetimeRebaseMode
    int96RebaseMode pathGlobFilter recursiveFileLookup modifiedBefore modifiedAfter ignoreCorruptFiles
    ignoreMissingFiles ignoreExtension versionAsOf timestampAsOf snapshot-id as-of-timestamp branch tag
    driver fetchsize numPartitions partitionColumn lowerBound upperBound queryTimeout batchsize isolationLevel
    pushDownPredicate pushDownAggregate pushDownLimit preferTimestampNTZ user dbtable table database databaseName schema
    currentSchema collection region sfDatabase sfSchema sfWarehouse sfRole ssl sslmode encrypt trustServerCertificate
    """.lower().split()
)
"""Options of readers, and parameters of addresses, that hold no secret whoever writes them."""
_CONF = re.compile(
    r"spark\.(master|app\.name|submit\.deployMode|default\.parallelism|serializer|jars\.packages|yarn\.queue"
    r"|(driver|executor)\.(memory|cores|instances|memoryOverhead\w*|maxResultSize|host|port|bindAddress|pyspark\.memory)"
    r"|(task|dynamicAllocation|memory|shuffle|speculation|locality|scheduler|network|rpc|python)\.[\w.]+|speculation"
    r"|ui\.(enabled|showConsoleProgress)|eventLog\.enabled|pyspark\.(driver\.)?python|sql\.(?!catalog\.)[\w.]+"
    r"|sql\.catalog\.\w+|databricks\.(delta|io)\.[\w.]+|hadoop\.fs\.defaultFS"
    r"|hadoop\.fs\.s3a\.(endpoint(\.region)?|path\.style\.access|connection\.[\w.]+|aws\.credentials\.provider|impl))"
)
"""Settings of Spark that hold none."""
_BEFORE_HOST = re.compile(r"(?<=://)[^/\s@:]*:(?!\d*/)\S*@")
"""User and password of an address; passwords hold any character, and a port is none."""
_NAMED = re.compile(
    r"((?:secret|token|passw(?:or)?d|passphrase|pwd|credential|signature|authorization"
    r"|(?:access|account|api|shared)[-_]?(?:access)?[-_]?key|(?<![a-z])(?:sig|pat|sas|jwt))\w*=)(\"[^\"]*\"|[^\s'\"&;,)]+)",
    re.IGNORECASE,
)
"""A secret within a value: ``...;AccountKey=...``, ``-Djavax.net.ssl.trustStorePassword=...``."""
_PARAMETER = re.compile(r"(?<=[?&])([\w.~%-]+)=([^&\s'\"]*)")
_BEARER = re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]+", re.IGNORECASE)
_SQL_PARTS = re.compile(
    r"(?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))|(?P<name>`[^`]*`)|'[^']*(?:'|\Z)|(?P<double>\"[^\"]*(?:\"|\Z))"
    r"|\$(?P<tag>\w*)\$.*?(?:\$(?P=tag)\$|\Z)",
    re.DOTALL,
)


def plain(value: Any, name: str = "") -> Any:
    """Return ``value`` as JSON values that decide what is done: secrets of the environment as their references.

    Args:
        value: a section, or a part of one.
        name: its key.
    """
    if isinstance(value, Secret):
        return value.reference
    if isinstance(value, msgspec.Struct):
        return _kind_of(value) | {field: plain(getattr(value, field), field) for field in value.__struct_fields__}
    if isinstance(value, dict):
        hidden = {key for key in value if name in ("conf", "options") and tells_a_secret(key)}
        values = {key: HIDDEN if key in hidden else plain(inner, key) for key, inner in value.items()}
        return {key: _without_names(inner) if name in ("conf", "options") else inner for key, inner in values.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return _BEFORE_HOST.sub(f"{HIDDEN}@", value) if isinstance(value, str) else value


def shown(value: Any, references: Mapping[Path, str], path: Path = ()) -> Any:
    """Return ``value`` as JSON values that anybody may see.

    Args:
        value: the sections of a file, or a part of them.
        references: the texts that values came from which name variables of the environment, by path.
        path: of ``value``.
    """
    if path == ("notify", "webhook") and isinstance(value, str):
        return "/".join(filter(None, [host_of(value), HIDDEN]))
    if isinstance(value, Secret):
        return _scrubbed(value.reference)
    free = len(path) > 2 and path[:2] in _FREE
    if path in references and (free or isinstance(value, str)):
        return _without_literals(references[path]) if path in _SQL else _scrubbed(references[path])
    if isinstance(value, msgspec.Struct):
        inner = {field: shown(getattr(value, field), references, (*path, field)) for field in value.__struct_fields__}
        return _kind_of(value) | inner
    if isinstance(value, dict):
        return {key: shown(inner, references, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shown(inner, references, (*path, index)) for index, inner in enumerate(value)]
    name = str(path[-1]) if path else ""
    if free:
        return shown_setting(name, value)
    if path[:2] in _ARGUMENTS and tells_a_secret(name):
        return HIDDEN
    if not isinstance(value, str):
        return value
    return _without_literals(value) if path in _SQL else _scrubbed(value)


def shown_setting(name: str, value: Any) -> Any:
    """An option of a reader, or a setting of Spark: hidden, unless its name is known to be harmless."""
    harmless = name.lower() in _OPTIONS or _CONF.fullmatch(name) is not None
    if not harmless or tells_a_secret(name):
        return value if isinstance(value, bool) else HIDDEN
    return _scrubbed(value) if isinstance(value, str) else value


def host_of(address: str) -> str:
    """The host of an address, as far as the file shows it: whoever knows the rest of a webhook's may post to it."""
    written = address.reference if isinstance(address, Secret) else address
    try:
        host = urlsplit(written).hostname
    except ValueError:  # a reference within brackets
        return ""
    return host if host and "$" not in host else ""


def _kind_of(section: msgspec.Struct) -> dict[str, Any]:
    tagged = type(section).__struct_config__
    return {tagged.tag_field: tagged.tag} if tagged.tag_field and tagged.tag is not None else {}


def _without_names(value: Any) -> Any:
    return _NAMED.sub(rf"\1{HIDDEN}", value) if isinstance(value, str) else value


def _scrubbed(text: str) -> str:
    """A text without what looks like a secret in it; references to the environment stay."""

    def parameter(match: re.Match[str]) -> str:
        return match[0] if match[1].lower() in _OPTIONS else f"{match[1]}={_safe(match[2])}"

    text = _BEFORE_HOST.sub(lambda match: match[0] if "${" in match[0] else f"{HIDDEN}@", text)
    text = _NAMED.sub(lambda match: f"{match[1]}{_safe(match[2])}", text)
    return _BEARER.sub(rf"\1 {HIDDEN}", _PARAMETER.sub(parameter, text))


def _safe(text: str) -> str:
    return text if re.fullmatch(r"\$\{[^}]*\}", text) or text == HIDDEN else HIDDEN


def _without_literals(sql: str) -> str:
    """A statement without what stands in quotation marks or comments, unless that is a reference alone."""
    if "\\" in sql:  # which ends a literal for one database and does not for another: all between the outermost
        return re.sub(r"'.*'", f"'{HIDDEN}'", re.sub(r'".*"', f'"{HIDDEN}"', sql, flags=re.DOTALL), flags=re.DOTALL)

    def part(match: re.Match[str]) -> str:
        if match["name"] is not None:
            return match[0]
        if match["comment"] is not None:
            return f"/* {HIDDEN} */"
        quote = '"' if match["double"] is not None else "'"
        return f"{quote}{_safe(match[0].strip(quote))}{quote}"

    return _SQL_PARTS.sub(part, sql)
