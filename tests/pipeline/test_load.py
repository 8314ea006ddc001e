"""A pipeline file becomes one checked value: defaults, overrides, environment, places, YAML without its traps."""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.errors import ConfigError, PipelineFileError, StorageError
from sparkdl.features.spec import Category, Number
from sparkdl.pipeline.file import load, loads
from sparkdl.pipeline.file.tree import MAX_BYTES
from sparkdl.pipeline.spec import HashSplit, Label, TimeSplit
from sparkdl.pipeline.spec.base import Secret, hours_of

FILES = Path(__file__).parent / "files"
EXAMPLES = sorted(FILES.glob("*.yaml"))
MINIMAL = (FILES / "minimal.yaml").read_text()


def refused(text, *overrides, **environment):
    with pytest.raises(PipelineFileError) as caught:
        loads(textwrap.dedent(text), overrides, environment)
    return list(caught.value.problems)


def with_line(line):
    """A file that is valid but for ``line``, which is its fourth."""
    return f"{MINIMAL}{textwrap.dedent(line)}\n"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_is_sound(file):
    assert load(file, environment={"S3_SECRET_KEY": "hunter2"}).spec.features


def test_a_file_of_three_sections_has_defaults_for_the_rest(tmp_path):
    (tmp_path / "wine prices.yaml").write_text(MINIMAL)
    spec = load(tmp_path / "wine prices.yaml").spec
    assert spec.name == spec.publish.name == "wine-prices"
    assert spec.source.path == f"file://{tmp_path}/wine.csv"
    assert spec.features == {"alcohol": Number(), "colour": Category()}
    assert spec.label == {"quality": Label(type="regression")}
    assert spec.split == HashSplit()
    assert spec.publish.registry == spec.places.registry == f"file://{tmp_path}/sparkdl-data/wine-prices/registry"
    assert spec.score.target == f"file://{tmp_path}/sparkdl-data/wine-prices/tables/predictions"
    assert loads(MINIMAL, ["source.time=day"]).spec.split == TimeSplit()


def test_loading_needs_neither_spark_nor_torch():
    code = f"""
        import sys
        from sparkdl.pipeline.file import load
        load({str(FILES / "churn.yaml")!r}).resolved()
        heavy = {{"pyspark", "torch", "pyarrow", "pandas"}} & sys.modules.keys()
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_relative_addresses_are_relative_to_the_file_and_others_stay(tmp_path):
    text = """
        root: ../kept
        source: {kind: delta, table: %s}
        features: {a: number}
        label: {b: binary}
    """
    said = {
        "lake/t": f"file://{tmp_path}/lake/t",
        "./a.b": f"file://{tmp_path}/a.b",
        "main.sales.t": "main.sales.t",
        "s3://bucket/t/": "s3://bucket/t",
        "/lake/t": "/lake/t",
        "~/t": "~/t",
    }
    for written, meant in said.items():
        spec = loads(textwrap.dedent(text) % written, folder=tmp_path).spec
        assert spec.source.table == meant
        assert spec.root == f"file://{tmp_path.parent}/kept"
        assert spec.code == str(tmp_path)


def test_a_file_in_a_bucket_has_its_neighbours_there():
    from sparkdl.pipeline.file.load import beside

    assert beside("../t", "s3://bucket/a/b") == "s3://bucket/a/t"


def test_several_columns_under_one_key():
    text = MINIMAL.replace("alcohol: number", "'x, y': number, 'I08..I11': {type: number, log: true}, I09: category")
    features = loads(text).spec.features
    assert list(features) == ["x", "y", "I08", "I10", "I11", "I09", "colour"]
    assert features["I10"].log
    assert features["I09"] == Category()
    assert refused(text.replace("x, y", "x, colour")) == [
        "pipeline.yaml:2: features.colour stands at pipeline.yaml:2 already: keep one of the two"
    ]
    assert "counts from 13 to 1" in refused(text.replace("I08..I11", "I13..I1"))[0]
    assert len(refused(text.replace("log: true", "log: yes"))) == 1
    assert "more than 10000 features" in refused(text.replace("I08..I11", "I0..I9999, J0..J9"))[0]


def test_overrides_win_over_the_file():
    overrides = [
        "train.epochs=7",
        "features.alcohol.log=true",
        "features.sugar=number",
        "spark.conf.spark.sql.shuffle.partitions=8",
        "model.arguments.hidden=[64, 32]",
        "search.space.train.batch_size=[16, 32]",
        "split={by: hash, train: 0.5, test: 0.2}",
        "split.seed=3",
        "expect.no free wine=price > 0",
        "notify.command=tell me",
    ]
    spec = loads(MINIMAL, overrides).spec
    assert spec.train.epochs == 7
    assert spec.features["alcohol"].log
    assert spec.features["sugar"] == Number()
    assert spec.spark.conf == {"spark.sql.shuffle.partitions": 8}
    assert spec.model.arguments == {"hidden": [64, 32]}
    assert spec.search.space == {"train.batch_size": (16, 32)}
    assert (spec.split.train, spec.split.seed) == (0.5, 3)
    assert spec.expect["no free wine"].check == "price > 0"
    assert loads(MINIMAL, [*overrides, "notify=null", "search=null"]).spec.notify is None


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.epochs=0", "override train.epochs: train.epochs=0 is below 1: give at least 1"),
        ("train.epoch=3", "override train.epoch: train.epoch is not a key of train: write epochs"),
        ("trian.epochs=3", "override trian.epochs: trian is not a key of a pipeline: write train"),
        ("train.epochs.x=3", "override train.epochs.x: sets x of a value that holds no keys: leave .x out"),
        ("train.epochs", "override train.epochs: sets nothing: write it as section.key=value"),
        ("features.alcohol.lgo=true", "override features.alcohol.lgo: features.alcohol.lgo is not a key of "
                                      "features.alcohol: write log"),
    ],
)  # fmt: skip
def test_an_override_that_is_wrong_is_named(override, sentence):
    assert refused(MINIMAL, override) == [sentence]


def test_variables_of_the_environment_are_filled_in():
    text = with_line("""
        root: ${BUCKET}/x
        name: ${NAME:-sales}
        train: {epochs: "${EPOCHS:-3}", batch_size: 7}
        expect: {dollar: "x = '$${BUCKET}'"}
    """)
    spec = loads(text, (), {"BUCKET": "s3://b"}).spec
    assert (spec.root, spec.name, spec.train.epochs) == ("s3://b/x", "sales", 3)
    assert spec.expect["dollar"].check == "x = '${BUCKET}'"
    spec = loads(text, (), {"BUCKET": "s3://b", "EPOCHS": "9", "NAME": "2026"}).spec
    assert (spec.name, spec.train.epochs) == ("2026", 9)
    assert refused(text, BUCKET="s3://b", EPOCHS="many") == [
        "pipeline.yaml:7: train.epochs='${EPOCHS:-3}' is a text: give a whole number"
    ]
    assert refused(with_line("train: {epochs: ${EPOCHS}}")) == [
        "pipeline.yaml:4: has a ${NAME} between braces or brackets: put it into quotation marks"
    ]


def test_a_variable_is_a_value_and_never_structure():
    spec = loads(with_line("root: ${PLACE}"), (), {"PLACE": "/x}\nsearch: {space: [1]"}).spec
    assert spec.root == "/x}\nsearch: {space: [1]"
    assert spec.search is None


def test_a_missing_variable_is_named_once_with_the_nearest():
    assert refused(with_line("train: {epochs: '${EPOCHES}'}"), EPOCHS="3") == [
        "pipeline.yaml:4: train.epochs='${EPOCHES}' takes EPOCHES from the environment, where it is not set: write "
        "${EPOCHS}"
    ]
    assert "set it, or write ${BUCKET:-default}" in refused(with_line("root: ${BUCKET}"))[0]
    assert "where it is empty" in refused(with_line("root: ${BUCKET}"), BUCKET="")[0]
    assert "names no variable" in refused(with_line("root: ${1x}"))[0]


def test_what_an_override_replaces_needs_no_variable():
    assert loads(with_line("root: ${BUCKET}"), ["root=/x"], {}).spec.root == "/x"
    seen = loads(with_line("root: /x"), ["root=${BUCKET}", "score.keep=${COLUMN}"], {"BUCKET": "/b", "COLUMN": "c"})
    assert (seen.spec.root, seen.spec.score.keep) == ("/b", ("c",))
    assert (seen.resolved()["root"], seen.resolved()["score"]["keep"]) == ("${BUCKET}", ["${COLUMN}"])


def test_secrets_are_used_and_never_shown():
    secret = "hunter2"
    environment = {"S3_SECRET_KEY": secret, "HOOK_TOKEN": secret, "MLFLOW_PASSWORD": secret}
    text = with_line("""
        publish: {mlflow: "postgresql://me:${MLFLOW_PASSWORD}@host/db"}
        notify: {webhook: "https://hooks.example/${HOOK_TOKEN}"}
        spark:
          conf: {spark.hadoop.fs.s3a.secret.key: "${S3_SECRET_KEY}", spark.my.password: written, spark.x: 1}
    """)
    file = loads(text, (), environment)
    assert file.spec.spark.conf["spark.hadoop.fs.s3a.secret.key"] == secret
    assert file.spec.notify.webhook == f"https://hooks.example/{secret}"
    assert file.spec.publish.mlflow == f"postgresql://me:{secret}@host/db"
    resolved = file.resolved()
    assert resolved["publish"]["mlflow"] == "postgresql://me:${MLFLOW_PASSWORD}@host/db"
    assert resolved["spark"]["conf"] == {
        "spark.hadoop.fs.s3a.secret.key": "${S3_SECRET_KEY}",
        "spark.my.password": "(hidden)",
        "spark.x": "(hidden)",
    }
    assert resolved["notify"]["webhook"] == "hooks.example/(hidden)"
    for shown in (repr(file), json.dumps(resolved)):
        assert secret not in shown
    assert pickle.loads(pickle.dumps(file)).resolved() == resolved
    for wrong in ('notify: {webhook: "ftp://${HOOK_TOKEN}"}', "spark: {conf: {a: [ '${HOOK_TOKEN}' ]}}",
                  "notify: {command: \"'${HOOK_TOKEN}\"}", "notify: {webhok: '${HOOK_TOKEN}'}",
                  "spark: {conf: '${HOOK_TOKEN}'}", "notify: {when: '${HOOK_TOKEN}'}"):  # fmt: skip
        assert secret not in refused(with_line(wrong), **environment)[0]


SECRETS = (
    *("spark.ssl.keyStorePassword", "spark.ssl.keyPassword", "fs.azure.account.key.acct.dfs.core.windows.net"),
    *("sfPassword", "accessToken", "trustStorePassword", "awsAccessKeyId", "clientSecret", "es.net.http.auth.pass"),
    *("PWD", "apiKey", "fs.azure.sas.container.acct.blob.core.windows.net"),
)


@pytest.mark.parametrize("name", SECRETS)
def test_what_stands_in_the_file_under_the_name_of_a_secret_is_hidden(name):
    text = with_line(f"spark: {{conf: {{{name}: hunter2}}}}")
    file = loads(text, [f"source={{kind: spark, format: x, options: {{{name}: hunter2}}}}"])
    assert file.spec.spark.conf == {name: "hunter2"}
    assert file.resolved()["spark"]["conf"] == file.resolved()["source"]["options"] == {name: "(hidden)"}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("mongodb://me:hun/t@er2@host:1/db", "mongodb://(hidden)@host:1/db"),
        (
            "DefaultEndpointsProtocol=https;AccountKey=hunter2==;Suffix=x",
            "DefaultEndpointsProtocol=https;AccountKey=(hidden);Suffix=x",
        ),
        ("-Dssl.trustStorePassword=hunter2 -Da=b", "-Dssl.trustStorePassword=(hidden) -Da=b"),
        ('Module required user="me" password="hun ter2";', 'Module required user="me" password=(hidden);'),
        ("hdfs://name:8020/folder@1", "hdfs://name:8020/folder@1"),
        ("SELECT * FROM t WHERE token = 'x'", "SELECT * FROM t WHERE token = 'x'"),
        ("https://host/x?sv=1&sig=hunter2&sslmode=on", "https://host/x?sv=(hidden)&sig=(hidden)&sslmode=on"),
        ("Endpoint=sb://x/;SharedAccessSignature=hunter2;a=b", "Endpoint=sb://x/;SharedAccessSignature=(hidden);a=b"),
        ("Authorization: Bearer hunter2", "Authorization: Bearer (hidden)"),
        ("a;pat=hunter2", "a;pat=(hidden)"),
    ],
)
def test_a_secret_within_a_value_is_hidden(written, told):
    file = loads(with_line(f"transform: {{function: 'a:b', arguments: {{x: {json.dumps(written)}}}}}"))
    assert file.spec.transform.arguments == {"x": written}
    assert file.resolved()["transform"]["arguments"] == {"x": told}


def test_options_are_shown_by_names_that_are_known_to_be_harmless():
    options = {"header": True, "SEP": ";", "header.Authorization": "Bearer hunter2", "authHeader": "hunter2",
               "pat": "hunter2", "x": "hunter2", "pin": 1234}  # fmt: skip
    conf = {"spark.sql.shuffle.partitions": 8, "spark.executor.memory": "4g", "spark.my.own": "hunter2",
            "spark.sql.catalog.c.credential": "hunter2", "spark.hadoop.fs.s3a.endpoint": "http://h:1"}  # fmt: skip
    sections = {"source": {"kind": "spark", "format": "x", "options": options}, "spark": {"conf": conf}}
    file = loads(
        with_line(json.dumps({"spark": sections["spark"]})[1:-1]), [f"source={json.dumps(sections['source'])}"]
    )
    seen = file.resolved()
    assert seen["source"]["options"] == {
        name: options[name] if name in ("header", "SEP") else "(hidden)" for name in options
    }
    harmless = ("spark.sql.shuffle.partitions", "spark.executor.memory", "spark.hadoop.fs.s3a.endpoint")
    assert seen["spark"]["conf"] == {name: conf[name] if name in harmless else "(hidden)" for name in conf}
    assert file.spec.source.options == options
    assert file.redacted("401 for Bearer hunter2; by ;") == "401 for (hidden); by ;"
    assert file.deciding()["source"]["options"]["x"] == "hunter2"  # what decides goes into a hash, and nowhere else


def test_what_came_from_the_environment_is_shown_as_it_was_referred_to():
    environment = {"MINE": "hunter2", "ROOT": "/hunter2/x", "N": "7", "COLUMN": "column", "OPEN": "seen"}
    text = with_line("""
        name: shown
        root: "${ROOT}"
        show_variables: [OPEN]
        transform: {sql: "SELECT *, '${MINE}' AS a, 'literal' AS b FROM {source} -- a remark"}
        weight: "${COLUMN}"
        train: {epochs: "${N}"}
        spark: {conf: {spark.executor.memory: "${MINE}", spark.yarn.queue: "${OPEN}"}}
    """)
    source = {"kind": "function", "function": "a:b", "arguments": {"x": "${MINE}", "y": ["${OPEN}", "${MINE:-no}"]}}
    file = loads(text, [f"source={json.dumps(source)}", 'score.keep=["${MINE}"]'], environment)
    assert file.spec.transform.sql.startswith("SELECT *, 'hunter2'")
    assert file.spec.source.arguments == {"x": "hunter2", "y": ["seen", "hunter2"]}
    seen = file.resolved()
    assert seen["transform"]["sql"] == "SELECT *, '${MINE}' AS a, '(hidden)' AS b FROM {source} /* (hidden) */"
    assert seen["source"]["arguments"] == {"x": "${MINE}", "y": ["seen", "${MINE:-no}"]}
    assert (seen["root"], seen["places"]["runs"]) == ("${ROOT}", "${ROOT}/shown/runs")
    assert (seen["weight"], seen["train"]["epochs"], seen["score"]["keep"]) == ("${COLUMN}", 7, ["${MINE}"])
    assert seen["spark"]["conf"] == {"spark.executor.memory": "${MINE}", "spark.yarn.queue": "seen"}
    for told in (json.dumps(seen), repr(file)):
        assert "hunter2" not in told
    assert file.redacted("no rights: hunter2 at /hunter2/x, 7") == "no rights: ${MINE} at ${ROOT}, 7"


def test_a_mistake_shows_no_value_of_the_environment():
    text = with_line('weight: "${MINE}"')
    assert "weight='${MINE}' is the label" in refused(text, MINE="quality")[0]
    short = refused(text.replace("quality:", "y:"), MINE="y")[0]  # so few characters stand in any text
    assert "weight='y' is the label" in short
    with pytest.raises(PipelineFileError, match=r"weight='\$\{MINE\}' is no column of the source"):
        loads(text, environment={"MINE": "no_such_column"}).check_columns({"quality": pa.float64()})


def test_a_variable_that_is_named_in_show_variables_is_no_secret():
    text = with_line("root: '${TOKEN_FOLDER}'")
    assert "show_variables: [TOKEN_FOLDER]" in refused(text, TOKEN_FOLDER="/x")[0]
    for more, overrides in (("show_variables: [TOKEN_FOLDER]\n", []), ("", ["show_variables=[TOKEN_FOLDER]"])):
        assert loads(text + more, overrides, {"TOKEN_FOLDER": "/x"}).resolved()["root"] == "/x"


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("SELECT a FROM t WHERE k = 'hunter''2' AND b = 3", "SELECT a FROM t WHERE k = '(hidden)''(hidden)' AND b = 3"),
        (r"SELECT 'x\', 'hunter2' FROM t", "SELECT '(hidden)' FROM t"),
        ("SELECT $q$hunter2$q$, `it's`, 'hunter2", "SELECT '(hidden)', `it's`, '(hidden)'"),
    ],
)
def test_literals_of_a_query_are_hidden(query, told):
    source = json.dumps({"kind": "jdbc", "url": "jdbc:x:y", "query": query})
    assert loads(with_line(""), [f"source={source}"]).resolved()["source"]["query"] == told


@pytest.mark.parametrize(
    "line",
    [
        "root: 'https://a.blob.core.windows.net/c/x?sv=2024&sig=hunter2'",
        "places: {tables: 's3://KEY:hunter2@bucket/x'}",
        "score: {target: 'https://h/x?X-Amz-Signature=hunter2'}",
    ],
)
def test_an_address_that_holds_a_secret_is_refused_and_not_shown(line):
    told = refused(with_line(line))[0]
    assert "holds a signature, a token or a password" in told
    assert "hunter2" not in told
    assert loads(with_line("root: 'abfss://box@account.dfs.core.windows.net/x'")).spec.root


def test_every_address_of_a_source_is_looked_at():
    told = refused(MINIMAL, "source={kind: delta, table: /x, allow_folders: [/y, 's3://KEY:hunter2@bucket/x']}")[0]
    assert "source.allow_folders holds a signature, a token or a password" in told
    assert "hunter2" not in told


def test_user_and_password_of_any_address_are_hidden():
    file = loads(with_line("transform: {function: 'a:b', arguments: {at: 'http://me:hunter2@host/x'}}"))
    assert file.resolved()["transform"]["arguments"] == {"at": "http://(hidden)@host/x"}


@pytest.mark.parametrize(
    "name",
    ["MY_TOKEN", "PGPASSWORD", "MYSQL_PWD", "SMTP_PASS", "AZURE_KEY1", "AWS_ACCESS_KEY_ID", "APIKEY", "GITHUBTOKEN"],
)
def test_a_secret_does_not_get_into_what_is_recorded(name):
    (told,) = refused(with_line(f"model: {{arguments: {{login: '${{{name}}}'}}}}"), **{name: "hunter2"})
    assert f"model.arguments.login='${{{name}}}' is written into the run's record" in told
    assert "hunter2" not in told


@pytest.mark.parametrize(
    "name",
    [
        *("KEY_COLUMN", "TOKEN_COLUMN", "token_column", "MAX_TOKENS", "MAX_NEW_TOKENS", "TOKENIZER", "TOKENISER_NAME"),
        *("TOKEN_LIMIT", "KEYBOARD", "KEY", "PWD", "OLDPWD", "COMPASS", "PASSES", "BYPASS"),
    ],
)
def test_a_name_that_only_resembles_a_secrets_is_taken(name):
    assert loads(with_line(f"weight: ${{{name}}}"), (), {name: "w"}).spec.weight == "w"


def test_a_secret_hides_behind_its_reference():
    secret = pickle.loads(pickle.dumps(Secret("hunter2", "${PASSWORD}")))
    assert secret == "hunter2"
    assert repr([secret]) == "['${PASSWORD}']"


def test_yaml_1_2_without_traps():
    text = with_line("""
        weight: no
        train: {learning_rate: 1e-3, epochs: 1e1, max_grad_norm: 5}
        name: 2026-03-01
        expect: {on: y > 0, 12: z > 0}
    """)
    spec = loads(text).spec
    assert (spec.weight, spec.name) == ("no", "2026-03-01")
    assert (spec.train.learning_rate, spec.train.epochs, spec.train.max_grad_norm) == (0.001, 10, 5.0)
    assert list(spec.expect) == ["on", "12"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train: {shuffle: no}", "train.shuffle='no' is a text: give true or false"),
        ("train: {shuffle: On}", "train.shuffle='On' is a text: give true or false"),
        ("train: {batch_size: 1_000}", "train.batch_size='1_000' is a text: give a whole number"),
        ("train: {batch_size: '64'}", "train.batch_size='64' is a text: give a whole number"),
        ("train: {batch_size: 010}", "train.batch_size='010' is a text: give a whole number"),
        ("train: {batch_size: 1.5}", "train.batch_size=1.5 is a number: give a whole number"),
        ("train: {batch_size: true}", "train.batch_size=true is a truth value: give a whole number"),
        ("train: {learning_rate: .nan}", "train.learning_rate='.nan' is a text: give a number"),
        ("train: {learning_rate: 1e999}", "train.learning_rate=inf is no finite number: give one that is"),
        ("train: {keep_checkpoints: }", "train.keep_checkpoints=null is empty: give a whole number"),
        ("weight: 5", "weight=5 is a number: give a text, or '5' with its quotation marks"),
        ("weight: [a]", "weight=['a'] is a list: give a text"),
        ("train: [1]", "train=[1] is a list: give a section with epochs, batch_size, optimizer, learning_rate, "
                       "weight_decay, ..."),
        ("root: ''", "root='' is empty: write a text, or leave it out"),
        ("name: a/b", "name='a/b' is not of the form that is wanted: write it like 'my-model'"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_says_what_was_meant(line, sentence):
    assert refused(with_line(line)) == [f"pipeline.yaml:4: {sentence}"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "pipeline.yaml: is empty: write at least source, features and label"),
        ("# nothing\n", "pipeline.yaml: is empty: write at least source, features and label"),
        ("- a\n- b\n", "pipeline.yaml:1: holds no sections at its top: begin with `source:`"),
        ("source", "pipeline.yaml:1: holds no sections at its top: begin with `source:`"),
        ("a: 1\nb:\n\tc: 2\n", "pipeline.yaml:3: is indented with a tab, which YAML does not allow: use spaces"),
        ("a: [1\nb: 2\n", "pipeline.yaml:2: is no YAML"),
        ("a: 1\n---\nb: 2\n", "pipeline.yaml:2: starts a second document: keep one document a file"),
        ("a: !!python/object:os.system x\n", "pipeline.yaml:1: has the tag"),
        ("a: \x07\n", "pipeline.yaml:1: holds a character that YAML does not allow"),
        ("a: *b\n", "pipeline.yaml:1: uses *b before &b ends: write it out"),
        ("a: &b [*b]\n", "pipeline.yaml:1: uses *b before &b ends: write it out"),
        ("? [a]\n: 1\n", "pipeline.yaml:1: has a key that is no text: write `name: value`"),
        ("a: " + "[" * 500, "pipeline.yaml:1: is nested deeper than 40 levels"),
        ("a: " + "{b: " * 500, "pipeline.yaml:1: is nested deeper than 40 levels"),
        ("a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)),
         "pipeline.yaml:6: holds more than 20000 values, with what aliases repeat: leave some out"),
        ("a: 1\n" * MAX_BYTES, "pipeline.yaml: has "),
    ],
)  # fmt: skip
def test_text_that_is_no_pipeline(text, sentence):
    (told,) = refused(text)
    assert told.startswith(sentence)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "p.yaml").write_bytes(b"source:\n  kind: \xff\xfe\n")
    with pytest.raises(PipelineFileError, match=r"^p\.yaml:2: is no UTF-8"):
        load(tmp_path / "p.yaml")
    with pytest.raises(StorageError, match=r"nothing\.yaml"):
        load(tmp_path / "nothing.yaml")


def test_a_key_stands_once_and_aliases_repeat_values():
    text = with_line("""
        train: {epochs: 1}
        model: {arguments: {a: &size [1, 2], b: *size}}
    """)
    assert loads(text).spec.model.arguments == {"a": [1, 2], "b": [1, 2]}
    assert refused(text + "train: {epochs: 2}\n") == [
        "pipeline.yaml:8: train stands at pipeline.yaml:5 already: keep one of the two"
    ]
    assert "train.<< merges keys" in refused(with_line("train: {<<: {epochs: 1}}"))[0]


def test_all_mistakes_of_a_file_are_told_at_once_in_its_order():
    with pytest.raises(ConfigError) as caught:
        loads(
            textwrap.dedent("""\
                source: {kind: csv, paht: x.csv}
                features:
                  a: nummer
                  b: {type: number, clip: [3, 1]}
                  c: {type: category, min_count: 0}
                label: {c: binary, d: {type: regression, loss: log_loss}}
                train: {epochs: 0, batch_size: -1}
                search: {method: random, space: {train.epoch: [1]}}
                """)
        )
    assert str(caught.value).split("\n  ") == [
        "pipeline.yaml has 8 mistakes:",
        "pipeline.yaml:1: source.paht is not a key of source: write path",
        "pipeline.yaml:3: features.a.type='nummer' is not known: write number",
        "pipeline.yaml:4: features.b.clip=[3.0, 1.0] has no room between its limits: give the lower one first",
        "pipeline.yaml:5: features.c.min_count=0 is below 1: give at least 1",
        "pipeline.yaml:6: label.d.loss='log_loss' is no loss of type 'regression': choose mse or mae or huber or "
        "poisson, or module:function",
        "pipeline.yaml:7: train.epochs=0 is below 1: give at least 1",
        "pipeline.yaml:7: train.batch_size=-1 is below 1: give at least 1",
        "pipeline.yaml:8: search.trials is missing: say how many settings random draws",
    ]
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


MARKS = st.text(st.sampled_from("{}[]:,-&*!|>'\"%@`#\n\t ~${}.x019é\x00"), max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_whatever_a_file_holds_is_read_or_refused(file, data):
    text = file.read_text()
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 20)))
        text = text[:start] + data.draw(MARKS) + text[end:]
    with contextlib.suppress(PipelineFileError):
        loads(text, (), {"S3_SECRET_KEY": "x"})


def test_hours_of_durations():
    assert [hours_of(text) for text in ("6 hours", "1 hour", "14days", "2 weeks")] == [6, 1, 336, 336]
