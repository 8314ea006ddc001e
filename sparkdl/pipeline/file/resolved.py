"""The values of a file as JSON: for the keys of a run's steps, and, without secrets, for its record.

In the record a text that came from the environment is shown as it was referred to, ``${NAME}``; settings of other
systems (``options``, ``conf``) are shown where their names are known to be harmless, and hidden else; within texts user
and password of an address, what ``name=value`` calls a secret, and the literals of SQL are hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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


def plain(section: msgspec.Struct) -> dict[str, Any]:
    """Return a section as JSON values that decide what is done: secrets of the environment as their references."""

    def deciding(value: Any, path: Path) -> Any:
        text = value.reference if isinstance(value, Secret) else value
        is_setting = len(path) > 1 and path[-2] in ("conf", "options")
        if is_setting and tells_a_secret(str(path[-1])):
            return HIDDEN
        if not isinstance(text, str):
            return text
        text = text if isinstance(value, Secret) else _BEFORE_HOST.sub(f"{HIDDEN}@", text)
        return _NAMED.sub(rf"\1{HIDDEN}", text) if is_setting else text

    return dict(_as_json(section, deciding))


def shown(section: msgspec.Struct, references: Mapping[Path, str]) -> dict[str, Any]:
    """Return a section as JSON values that anybody may see.

    Args:
        section: the whole of a file.
        references: the texts that values came from which name variables of the environment, by path.
    """

    def visible(value: Any, path: Path) -> Any:
        if path == ("notify", "webhook") and isinstance(value, str):
            return "/".join(filter(None, [host_of(value), HIDDEN]))
        if isinstance(value, Secret):
            return _scrubbed(value.reference)
        is_setting = path[:2] in _FREE
        if path in references and (is_setting or isinstance(value, str)):
            return _without_literals(references[path]) if path in _SQL else _scrubbed(references[path])
        if is_setting:
            return shown_setting(str(path[-1]), value)
        if path[:2] in _ARGUMENTS and tells_a_secret(str(path[-1])):
            return HIDDEN
        if not isinstance(value, str):
            return value
        return _without_literals(value) if path in _SQL else _scrubbed(value)

    return dict(_as_json(section, visible))


def _as_json(value: Any, leaf: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """A section, or a part of one, with what ``leaf`` says of each value and its path."""
    if isinstance(value, msgspec.Struct):
        config = type(value).__struct_config__
        kind = {} if config.tag_field is None else {config.tag_field: config.tag}
        fields = {name: _as_json(getattr(value, name), leaf, (*path, name)) for name in value.__struct_fields__}
        return kind | fields
    if isinstance(value, dict):
        return {key: _as_json(inner, leaf, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner, leaf, (*path, index)) for index, inner in enumerate(value)]
    return leaf(value, path)


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
