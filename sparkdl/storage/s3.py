"""One way to S3 for three clients: Spark's own (S3A), fsspec's (s3fs) and delta-rs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from sparkdl.errors import ConfigError

S3A_SETTINGS = (
    *("endpoint", "endpoint.region", "path.style.access", "connection.ssl.enabled"),
    *("access.key", "secret.key", "session.token"),
    *("aws.credentials.provider", "auth.profile.name", "auth.profile.file", "proxy.host"),
)
"""The settings that count, without ``fs.s3a.`` or ``fs.s3a.bucket.NAME.``."""
_HADOOP, _AWS = "org.apache.hadoop.fs.s3a.", "software.amazon.awssdk.auth.credentials."
_MAKERS = (f"{_HADOOP}auth.", _HADOOP, _AWS, "com.amazonaws.auth.profile.", "com.amazonaws.auth.")
_DEFAULT = (  # the first two of Hadoop's own, and all that follow them
    f"{_HADOOP}TemporaryAWSCredentialsProvider {_HADOOP}SimpleAWSCredentialsProvider {_AWS}DefaultCredentialsProvider"
)
_KEYS = {"TemporaryAWSCredentialsProvider", "SimpleAWSCredentialsProvider"}
_NOBODY = {"AnonymousAWSCredentialsProvider", "AnonymousAWSCredentials", "AnonymousCredentialsProvider"}
_PROFILE = {"ProfileAWSCredentialsProvider", "ProfileCredentialsProvider"}
_FOUND = {  # what Python's clients look for by themselves, too
    *("EnvironmentVariableCredentialsProvider", "WebIdentityTokenCredentialsProvider"),
    *("WebIdentityTokenFileCredentialsProvider", "ContainerCredentialsProvider"),
    *("EC2ContainerCredentialsProviderWrapper", "IAMInstanceCredentialsProvider"),
    *("InstanceProfileCredentialsProvider", "DefaultCredentialsProvider", "DefaultAWSCredentialsProviderChain"),
}
_AWS_REGION = re.compile(r"s3[.-](?:dualstack\.|fips\.)?([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.com(?:\.cn)?")
_IN_A_HOST = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
"""Names of buckets that can be part of a host's."""
_FSSPEC_ONLY = ("session", "username", "password")


def bucket_of(uri: str) -> str:
    """The bucket that an address of S3 begins with."""
    return uri.partition("://")[2].partition("/")[0]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class S3Access:
    """How a bucket is reached; empty where nothing is said.

    It says the same in the words of each client; neither a session nor a network is touched. Who says something first
    is heard, for each of three things as a whole: where the store is (endpoint and addressing), its region, and who
    asks (keys, a profile, nobody).

    1. Options that are given with an address: ``Table(storage_options=...)``, ``Storage.of(uri, options)``.
    2. fsspec's configuration: ``fsspec.config.conf["s3"]``, its files, its ``FSSPEC_S3_*`` variables.
    3. The environment: ``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_ACCESS_KEY_ID``, ``AWS_PROFILE``.
    4. ``fs.s3a.bucket.NAME.*``, then ``fs.s3a.*`` of the session, with the meaning that Hadoop's documentation gives.
    5. Where nobody does, what the clients find by themselves: AWS's files, the role of a container or an instance.

    Attributes:
        endpoint: URL of the store; AWS's own where it is empty.
        style: ``"path"``, or ``"virtual"`` for buckets that are part of the host's name.
        region: where the bucket is.
        key: who asks.
        secret: proves it.
        token: of a key that is valid for a while.
        profile: of AWS's files, instead of keys.
        anonymous: whether requests go unsigned.
        otherwise: whether it is said who asks in words that fsspec's client alone has.
        proxied: whether a proxy stands before the store, which each client is told of by itself.
    """

    endpoint: str = ""
    style: str = ""
    region: str = ""
    key: str = ""
    secret: str = ""
    token: str = ""
    profile: str = ""
    anonymous: bool = False
    otherwise: bool = False
    proxied: bool = False

    @property
    def says_who(self) -> bool:
        """Whether it says anything of who asks."""
        return bool(self.key or self.secret or self.token or self.profile or self.anonymous or self.otherwise)

    def over(self, other: S3Access) -> S3Access:
        """This, and what ``other`` says of where, of the region, and of who, where this says nothing of it."""
        where, who = self if self.endpoint or self.style else other, self if self.says_who else other
        region, proxied = self.region or other.region, self.proxied or other.proxied
        return replace(who, endpoint=where.endpoint, style=where.style, region=region, proxied=proxied)

    def over_s3a(self, settings: Mapping[str, str], bucket: str) -> S3Access:
        """This, and what the session says of a bucket, where neither this nor the environment says it.

        Endpoint and keys of the environment are left out, for the clients hear them themselves. Where the session says
        the same, as Spark sees to, they are kept, and so reach workers.

        Args:
            settings: as Spark has them, without ``fs.s3a.``.
            bucket: whose own settings come first.

        Raises:
            ConfigError: credentials are to come from a provider that only Spark can ask.
        """
        bucket_settings = {
            name: settings.get(f"bucket.{bucket}.{name}") or settings.get(name) or "" for name in S3A_SETTINGS
        }
        bucket_settings = {name: value.strip() for name, value in bucket_settings.items()}
        access, env = _where(bucket_settings, bucket), os.environ
        if env.get("AWS_ENDPOINT_URL_S3", env.get("AWS_ENDPOINT_URL", access.endpoint)).rstrip("/") != access.endpoint:
            access = replace(access, endpoint="", style="")
        access = replace(access, region=env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or access.region)
        elsewhere = (
            env.get("AWS_ACCESS_KEY_ID", bucket_settings["access.key"]) != bucket_settings["access.key"]
            or "AWS_PROFILE" in env
        )
        return self.over(access if self.says_who or elsewhere else _who(bucket_settings, bucket).over(access))

    @classmethod
    def of_fsspec(cls, options: Mapping[str, Any]) -> S3Access:
        """What options of s3fs say."""
        client, config = options.get("client_kwargs") or {}, options.get("config_kwargs") or {}
        return cls(
            endpoint=str(options.get("endpoint_url") or client.get("endpoint_url") or ""),
            style=str((config.get("s3") or {}).get("addressing_style") or ""),
            region=str(client.get("region_name") or ""),
            key=str(options.get("key") or client.get("aws_access_key_id") or ""),
            secret=str(options.get("secret") or client.get("aws_secret_access_key") or ""),
            token=str(options.get("token") or client.get("aws_session_token") or ""),
            profile=str(options.get("profile") or ""),
            anonymous=bool(options.get("anon")),
            otherwise=any(options.get(name) for name in _FSSPEC_ONLY),
            proxied=bool(config.get("proxies")),
        )

    def to_fsspec(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The access in the words of s3fs, over the options that are there."""
        config = options.get("config_kwargs") or {}
        ours: dict[str, Any] = {"endpoint_url": self.endpoint, "profile": self.profile, "anon": self.anonymous}
        if not self.otherwise:
            ours |= {"key": self.key, "secret": self.secret, "token": self.token}
        if self.region:
            ours["client_kwargs"] = {**(options.get("client_kwargs") or {}), "region_name": self.region}
        if self.style:
            ours["config_kwargs"] = {**config, "s3": {**(config.get("s3") or {}), "addressing_style": self.style}}
        # a name without a value stays, or the client takes it from fsspec's configuration
        return {**options, **{name: value or None for name, value in ours.items() if value or name in options}}

    @classmethod
    def of_delta(cls, options: Mapping[str, str], bucket: str) -> S3Access:
        """What options of delta-rs say."""
        named = {_delta_name(name): value for name, value in options.items()}
        style = named.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower()
        return cls(
            endpoint=named.get("AWS_ENDPOINT_URL", "").replace(f"://{bucket}.", "://", 1),
            style=style and ("virtual" if style == "true" else "path"),
            region=named.get("AWS_REGION", ""),
            key=named.get("AWS_ACCESS_KEY_ID", ""),
            secret=named.get("AWS_SECRET_ACCESS_KEY", ""),
            token=named.get("AWS_SESSION_TOKEN", ""),
            anonymous=named.get("AWS_SKIP_SIGNATURE", "").lower() == "true",
            proxied="AWS_PROXY_URL" in named,
        )

    def to_delta(self, options: Mapping[str, str], bucket: str) -> dict[str, str]:
        """The access in the words of delta-rs, over the options that are there.

        Raises:
            ConfigError: there is no such profile of AWS's files.
        """
        access = _of_profile(self.profile) if self.profile else self
        virtual = self.style == "virtual" and bool(self.endpoint)
        endpoint = self.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        options_found = {
            "AWS_ENDPOINT_URL": self.endpoint.replace("://", f"://{bucket}.", 1) if virtual else self.endpoint,
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": str(virtual).lower() if self.style else "",
            "AWS_ALLOW_HTTP": "true" if endpoint.startswith("http://") else "",
            "AWS_REGION": self.region,
            "AWS_ACCESS_KEY_ID": access.key,
            "AWS_SECRET_ACCESS_KEY": access.secret,
            "AWS_SESSION_TOKEN": access.token,
            "AWS_SKIP_SIGNATURE": "true" if self.anonymous else "",
            # of a store that is not AWS's it takes what else AWS's own clients would find for no credentials at all
            "AWS_FORCE_CREDENTIAL_LOAD": "" if access.key or self.anonymous or not self.endpoint else "true",
        }
        users_names = {_delta_name(name) for name in options}
        return {
            **{name: value for name, value in options_found.items() if value and name not in users_names},
            **options,
        }


def _delta_name(name: str) -> str:
    """One spelling of those that delta-rs takes for an option."""
    prefixed = f"AWS_{name.upper().removeprefix('AWS_')}"
    same = {"AWS_ENDPOINT": "AWS_ENDPOINT_URL", "AWS_TOKEN": "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION": "AWS_REGION"}
    return same.get(prefixed, prefixed)


def _where(bucket_settings: Mapping[str, str], bucket: str) -> S3Access:
    """Endpoint, addressing and region as S3A understands its settings."""
    endpoint, region = bucket_settings["endpoint"].rstrip("/"), bucket_settings["endpoint.region"]
    if endpoint and "://" not in endpoint:
        endpoint = f"{'http' if bucket_settings['connection.ssl.enabled'].lower() == 'false' else 'https'}://{endpoint}"
    host = (urlsplit(endpoint).hostname or "").lower()
    if host == "s3.amazonaws.com":  # any region's
        endpoint = host = ""
    named = _AWS_REGION.fullmatch(host)
    region = "" if region in ("sdk", "ec2") else region or (named[1] if named else "")
    virtual = host and not re.fullmatch(r"[\d.]+|.*:.*", host) and _IN_A_HOST.fullmatch(bucket)
    style = "path" if bucket_settings["path.style.access"].lower() == "true" else "virtual" if virtual else ""
    return S3Access(endpoint=endpoint, style=style, region=region, proxied=bool(bucket_settings["proxy.host"]))


def _who(bucket_settings: Mapping[str, str], bucket: str) -> S3Access:
    """What the first provider has that has anything; nothing where it is one that Python's clients ask as well.

    Raises:
        ConfigError: it is one that only Spark can ask, or none has anything.
    """
    key, secret, token = (bucket_settings[name] for name in ("access.key", "secret.key", "session.token"))
    providers = re.split(r"[\s,]+", bucket_settings["aws.credentials.provider"] or _DEFAULT)
    for provider in providers:
        maker = next((known_maker for known_maker in _MAKERS if provider.startswith(known_maker)), provider)
        name = provider.removeprefix(maker)
        temporary = name == "TemporaryAWSCredentialsProvider"
        if name in _KEYS:
            if key and secret and (token or not temporary):
                return S3Access(key=key, secret=secret, token=token if temporary else "")
        elif name in _NOBODY:
            return S3Access(anonymous=True)
        elif name in _PROFILE and not bucket_settings["auth.profile.file"]:
            return S3Access(profile=bucket_settings["auth.profile.name"] or "default")
        elif name in _FOUND:
            return S3Access()
        else:
            raise ConfigError(
                f"fs.s3a.aws.credentials.provider names {provider} for the bucket {bucket}, which only Spark can ask: "
                "give Python its own credentials in fsspec.config.conf['s3'] or AWS_* variables, or name the provider "
                "of keys, of nobody, of a profile, of the environment or of an instance"
            )
    raise ConfigError(
        f"fs.s3a.aws.credentials.provider names {', '.join(providers)} for the bucket {bucket}, and fs.s3a.access.key, "
        "fs.s3a.secret.key or fs.s3a.session.token is not set: set what that provider needs, or name another one"
    )


def _of_profile(profile: str) -> S3Access:
    """The keys of a profile, which delta-rs cannot be told by name; by the package that s3fs brings."""
    if find_spec("botocore") is None:
        raise ConfigError(
            f"the profile {profile!r} of AWS's files needs the package botocore, which is not installed here: "
            "pip install 'sparkdl[s3]', or give keys"
        )
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        credentials = Session(profile=profile).get_credentials()
    except BotoCoreError as cause:
        raise ConfigError(f"{cause}: name a profile that AWS's files have, or give keys") from cause
    if credentials is None:
        raise ConfigError(f"the profile {profile!r} of AWS's files has no credentials: write them there, or give keys")
    keys = credentials.get_frozen_credentials()
    return S3Access(key=keys.access_key, secret=keys.secret_key, token=keys.token or "")
