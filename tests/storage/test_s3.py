"""What Spark is told of S3, and what fsspec's client and delta-rs make of it; who is heard first."""

from __future__ import annotations

import pickle

import fsspec.config
import pytest

from sparkdl.errors import ConfigError, StorageError
from sparkdl.storage import Configuration, Storage, connect, session
from sparkdl.storage.s3 import S3Access
from sparkdl.tables.delta import delta_options
from sparkdl.tables.table import Table

MINIO = {
    "endpoint": "minio.lake:9000",
    "endpoint.region": "eu-west-1",
    "connection.ssl.enabled": "false",
    "path.style.access": "true",
    "access.key": "k",
    "secret.key": "hidden-secret",
}
AWS_NAMES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"),
    *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
)


@pytest.fixture(autouse=True)
def _nothing_is_said_elsewhere(monkeypatch):
    for name in AWS_NAMES:
        monkeypatch.delenv(name, raising=False)
    for name in ("s3", "s3a"):
        monkeypatch.delitem(fsspec.config.conf, name, raising=False)


@pytest.fixture
def told(monkeypatch):
    """Let the session say these settings, and take every endpoint for there."""

    def tell(**settings):
        monkeypatch.setattr(session, "_context", lambda: None)
        monkeypatch.setattr(session, "_connect_session", lambda: None)
        monkeypatch.setattr(session, "_lent", dict(settings))
        monkeypatch.setattr("sparkdl.storage.connect.check_answers", lambda access, uri: None)

    return tell


def test_settings_of_the_session_open_a_bucket_to_fsspec_and_to_delta_rs(told):
    told(**MINIO)
    assert Storage.of("s3://b/a").options == {
        "endpoint_url": "http://minio.lake:9000",
        "key": "k",
        "secret": "hidden-secret",
        "client_kwargs": {"region_name": "eu-west-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
    assert delta_options("s3://b/a", None) == {
        "AWS_ENDPOINT_URL": "http://minio.lake:9000",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "eu-west-1",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "hidden-secret",
    }


def test_nothing_said_is_nothing_given(told):
    told()
    assert Storage.of("s3://b/a").options == {}
    assert delta_options("s3://b/a", None) is None


def test_a_buckets_own_settings_come_first(told):
    own = {"bucket.b.access.key": "b's", "bucket.b.secret.key": "its", "bucket.b.endpoint": "https://other"}
    told(**MINIO, **own)
    assert {Storage.of(f"s3://{name}/a").options["key"] for name in ("b", "c")} == {"b's", "k"}
    assert Storage.of("s3://b").options["endpoint_url"] == "https://other"
    assert delta_options("s3://b/t", None)["AWS_ACCESS_KEY_ID"] == "b's"


def test_both_names_of_s3_are_one_place(told):
    told(**MINIO)
    assert Storage.of("s3a://b/a/") == Storage.of("s3://b/a") == Storage.of("s3n://b/a")
    assert Storage.of("s3a://b/a").options == Storage.of("s3://b/a").options
    assert Storage.of("s3://b/a").spark_uri == Storage.of("s3a://b/a").spark_uri == "s3a://b/a"
    assert Table("s3a://b/t").uri == Table("s3://b/t").uri


@pytest.mark.parametrize(
    ("said", "style"), [({"key": "f", "secret": "g"}, "path"), ({"endpoint_url": "http://here"}, None)]
)
def test_fsspecs_configuration_wins_where_it_says_something_and_the_session_serves_for_the_rest(
    told, monkeypatch, said, style
):
    told(**MINIO, **{"session.token": "no token of another key"})
    monkeypatch.setitem(fsspec.config.conf, "s3", {**said, "use_ssl": False})
    options, delta = Storage.of("s3://b/a").options, delta_options("s3://b/a", None)
    assert options.items() >= {**said, "use_ssl": False}.items()
    assert options["client_kwargs"] == {"region_name": "eu-west-1"}
    assert options.get("config_kwargs", {}).get("s3", {}).get("addressing_style") == style
    assert (
        options.get("token") == delta.get("AWS_SESSION_TOKEN") == (None if "key" in said else "no token of another key")
    )
    assert delta["AWS_ACCESS_KEY_ID"] == said.get("key", "k")
    assert delta["AWS_ENDPOINT_URL"] == said.get("endpoint_url", "http://minio.lake:9000")


def test_options_given_with_an_address_win_over_all(told, monkeypatch):
    told(**MINIO)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "f", "secret": "g", "token": "h"})
    given = {"aws_access_key_id": "mine", "aws_secret_access_key": "own", "timeout": "9s"}
    found = delta_options("s3://b/a", given)
    assert {name.lower(): value for name, value in found.items()}.items() >= given.items()
    assert len({name.lower() for name in found}) == len(found)
    assert "AWS_SESSION_TOKEN" not in found
    assert found["AWS_ENDPOINT_URL"] == "http://minio.lake:9000"
    files = Table("s3://b/a", given)._address.root
    assert (files.options["key"], files.options["secret"], files.options["token"]) == ("mine", "own", None)
    assert Storage.of("s3://b/a", {"anon": True}).options["key"] is None


def test_the_environment_is_left_to_the_clients(told, monkeypatch):
    told(**MINIO)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere")
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert Storage.of("s3://b/a").options == {"client_kwargs": {"region_name": "us-west-2"}}
    assert delta_options("s3://b/a", None) == {"AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-west-2"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")  # as Spark copies it into its own settings
    assert Storage.of("s3://b/a").options["secret"] == "hidden-secret"


HADOOP, SDK, OLD = "org.apache.hadoop.fs.s3a", "software.amazon.awssdk.auth.credentials", "com.amazonaws.auth"


@pytest.mark.parametrize(
    ("providers", "fsspec_says", "delta_says"),
    [
        (f"{HADOOP}.SimpleAWSCredentialsProvider", {"key", "secret"}, {"ACCESS_KEY_ID", "SECRET_ACCESS_KEY"}),
        (
            f" {HADOOP}.TemporaryAWSCredentialsProvider,\n {HADOOP}.SimpleAWSCredentialsProvider",
            {"key", "secret", "token"},
            {"ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"},
        ),
        (f"{HADOOP}.AnonymousAWSCredentialsProvider", {"anon"}, {"SKIP_SIGNATURE"}),
        (f"{SDK}.AnonymousCredentialsProvider", {"anon"}, {"SKIP_SIGNATURE"}),
        (f"{SDK}.EnvironmentVariableCredentialsProvider", set(), {"FORCE_CREDENTIAL_LOAD"}),
        (f"{OLD}.EnvironmentVariableCredentialsProvider", set(), {"FORCE_CREDENTIAL_LOAD"}),
        (f"{HADOOP}.auth.IAMInstanceCredentialsProvider", set(), {"FORCE_CREDENTIAL_LOAD"}),
        (f"{OLD}.InstanceProfileCredentialsProvider", set(), {"FORCE_CREDENTIAL_LOAD"}),
    ],
)
def test_each_provider_of_credentials_has_its_counterpart(told, providers, fsspec_says, delta_says):
    told(**{**MINIO, "session.token": "t", "aws.credentials.provider": providers})
    options, delta = Storage.of("s3://b/a").options, delta_options("s3://b/a", None)
    assert options.keys() - {"endpoint_url", "client_kwargs", "config_kwargs"} == fsspec_says
    place = {"ENDPOINT_URL", "VIRTUAL_HOSTED_STYLE_REQUEST", "ALLOW_HTTP", "REGION"}
    assert delta.keys() == {f"AWS_{name}" for name in place | delta_says}


@pytest.mark.parametrize(
    "provider", [f"{HADOOP}.auth.AssumedRoleCredentialProvider", "com.acme.SimpleAWSCredentialsProvider"]
)
def test_a_provider_that_only_spark_can_ask_is_refused_by_name_unless_somebody_else_says_who_asks(
    told, monkeypatch, provider
):
    told(**MINIO, **{"aws.credentials.provider": provider})
    for ask in (lambda: Storage.of("s3://b/a"), lambda: delta_options("s3a://b/a", None)):
        with pytest.raises(ConfigError, match=rf"names {provider} for the bucket b, which only Spark can ask: give "):
            ask()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    assert Table("s3://b/a", keys)._address.root.options["key"] == "x"
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "f", "secret": "g"})
    assert Storage.of("s3://b/a").options["key"] == "f"


def test_keys_that_are_asked_for_and_not_set_are_named(told):
    told(**{"access.key": "k", "aws.credentials.provider": f"{HADOOP}.SimpleAWSCredentialsProvider"})
    with pytest.raises(ConfigError, match=r"SimpleAWSCredentialsProvider for the bucket b, and .*fs\.s3a\.secret\.key"):
        Storage.of("s3://b/a")


def test_a_profile_of_awss_files_opens_it_to_both(told, tmp_path, monkeypatch):
    pytest.importorskip("botocore")
    (tmp_path / "credentials").write_text("[lake]\naws_access_key_id = p\naws_secret_access_key = q\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    settings = {"aws.credentials.provider": f"{HADOOP}.auth.ProfileAWSCredentialsProvider", "auth.profile.name": "lake"}
    told(**settings)
    assert Storage.of("s3://b/a").options == {"profile": "lake"}
    assert delta_options("s3://b/a", None) == {"AWS_ACCESS_KEY_ID": "p", "AWS_SECRET_ACCESS_KEY": "q"}
    told(**settings | {"auth.profile.name": "other"})
    with pytest.raises(ConfigError, match=r"profile .*other.* could not be found: name a profile"):
        delta_options("s3://b/a", None)


@pytest.mark.parametrize(
    ("settings", "bucket", "access"),
    [
        ({"endpoint": "s3.amazonaws.com"}, "b-ucket", {}),
        ({"endpoint": "s3.eu-central-1.amazonaws.com"}, "b_ucket", {"region": "eu-central-1"}),
        ({"endpoint.region": "sdk"}, "b-ucket", {}),
        ({"endpoint": "https://store.lake/"}, "b-ucket", {"endpoint": "https://store.lake", "style": "virtual"}),
        ({"endpoint": "https://store.lake"}, "b.ucket", {"endpoint": "https://store.lake"}),
        ({"endpoint": "10.0.0.1:9000"}, "b-ucket", {"endpoint": "https://10.0.0.1:9000"}),
        ({"endpoint": "http://[::1]:9000"}, "b-ucket", {"endpoint": "http://[::1]:9000"}),
    ],
)
def test_endpoint_addressing_and_region_mean_what_they_mean_to_spark(settings, bucket, access):
    found = S3Access().over_s3a(settings, bucket)
    assert (found.style, found.region) == (access.get("style", ""), access.get("region", ""))
    if "endpoint" in access or "region" not in access:
        assert found.endpoint == access.get("endpoint", "")


def test_a_bucket_that_is_part_of_the_hosts_name_is_written_as_delta_rs_wants_it(told):
    told(endpoint="https://store.lake:9000")
    found = delta_options("s3://b-ucket/t", None)
    assert found["AWS_ENDPOINT_URL"] == "https://b-ucket.store.lake:9000"
    assert found["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"] == "true"
    assert Storage.of("s3://b-ucket/t").options["endpoint_url"] == "https://store.lake:9000"
    assert Table("s3://b-ucket/t", found)._address.root.options["endpoint_url"] == "https://store.lake:9000"


@pytest.mark.parametrize("told_to", ["spark", "fsspec", "delta-rs", "everybody"])
def test_a_store_behind_a_proxy_is_not_tried_without_it(told, monkeypatch, told_to):
    tried = connect.check_answers
    told(endpoint="http://127.0.0.1:1")
    monkeypatch.setattr(connect, "check_answers", tried)
    monkeypatch.setattr(connect, "_CONNECT_TRIES", 1)
    for ask in (lambda: delta_options("s3://b/t", None), lambda: Storage.of("s3://b/t").exists()):
        with pytest.raises(StorageError, match=r"cannot reach s3://b/t: nobody answers at http://127\.0\.0\.1:1 "):
            ask()
    if told_to == "spark":
        monkeypatch.setitem(session._lent, "proxy.host", "proxy")
    if told_to == "fsspec":
        monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"proxies": {"http": "http://proxy"}}})
    if told_to == "everybody":
        monkeypatch.setenv("http_proxy", "http://proxy")
        monkeypatch.setenv("no_proxy", "elsewhere")
    given = {"proxy_url": "http://proxy"} if told_to == "delta-rs" else None
    assert delta_options("s3://b/t", given)["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1"


def test_settings_travel_and_are_shown_by_nothing(told, monkeypatch):
    told(**MINIO, **{"bucket.c.secret.key": "hidden-too", "bucket.c.access.key": "c"})
    sent = pickle.dumps(Configuration.here())
    shown = repr([Configuration.here(), Storage.of("s3://b/a"), Table("s3://b/t"), S3Access(secret="hidden-secret")])
    assert "hidden" not in shown
    told()
    with pickle.loads(sent).applied():
        assert Storage.of("s3://b/a").options["secret"] == "hidden-secret"
        assert Storage.of("s3://c/a").options["secret"] == "hidden-too"
    assert Storage.of("s3://b/a").options == {}


def test_of_a_connect_server_what_spark_conf_shows_is_used(monkeypatch):
    class Shown:
        class conf:
            getAll = {  # noqa: RUF012
                "spark.hadoop.fs.s3a.access.key": "at the start",
                "fs.s3a.access.key": "since",
                "spark.hadoop.fs.s3a.secret.key": "s",
                "spark.hadoop.fs.s3a.bucket.b.encryption.key": "not for us",
                "spark.app.name": "x",
            }

    monkeypatch.setattr(session, "_context", lambda: None)
    monkeypatch.setattr(session, "_connect_session", lambda: Shown)
    assert session.s3a_settings() == {"access.key": "since", "secret.key": "s"}
