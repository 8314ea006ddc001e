"""Who is told of the end of a run gets the record, whatever goes wrong there stays there, and no secret is shown."""

from __future__ import annotations

import json
import logging
import ssl
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sparkdl.documents.typed import Source, decode
from sparkdl.errors import TrainingError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.notify import notify
from sparkdl.pipeline.state.record import RunRecord

SECRET = "T0P-5ECRET"
ALL = ["promoted", "scored", "stopped", "not_promoted", "nothing_new", "refused", "lost", "failed"]


@pytest.fixture
def record():
    made = RunRecord(pipeline="shop", run_id="r1", started="2026-03-20T12:00:00+00:00")
    made.end("promoted", "auc 0.9 against the champion's 0.8")
    made.places = {"record": "/runs/r1/record.json", "report": "/runs/r1/report.html"}
    return made


@pytest.fixture(autouse=True)
def _direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


def asked(text, environment=None):
    file = loads(
        f"source: {{kind: csv, path: w.csv}}\nfeatures: {{a: number}}\nlabel: {{q: regression}}\nnotify: {text}\n",
        environment=environment or {},
    )
    return file.spec.notify, file


class Server:
    """A server that keeps what it was sent, and answers as it is told."""

    def __init__(self, status=200, location=None, drip=0.0, context=None):
        self.seen, self.paths = [], []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                server.paths.append(self.path)
                server.seen.append((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
                if drip:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                    for _ in range(200):
                        self.wfile.write(b"X: y\r\n")
                        self.wfile.flush()
                        time.sleep(drip)
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        # Of clients that leave: to print where that was, Python 3.11 parses source, and disturbs whoever else does.
        self.http.handle_error = lambda *_: None
        if context is not None:
            self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.address = f"http{'s' if context else ''}://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


PROGRAM = """
import json, os, sys
told = {name: value for name, value in os.environ.items() if name.startswith("SPARKDL_")}
open(sys.argv[1], "w").write(json.dumps([json.load(sys.stdin), told, sys.argv[2:]]))
"""


def test_a_command_gets_the_record_its_words_and_the_outcome(record, tmp_path, caplog):
    out = tmp_path / "told.json"
    (tmp_path / "tell.py").write_text(PROGRAM)
    spec, _ = asked(json.dumps({"command": f"{sys.executable} {tmp_path}/tell.py {out} '; touch {tmp_path}/no' $HOME"}))
    notify(spec, record)
    content, told, words = json.loads(out.read_text())
    assert decode(json.dumps(content).encode(), RunRecord, Source("told")) == record
    assert words == [f"; touch {tmp_path}/no", "$HOME"]
    assert not (tmp_path / "no").exists()
    assert told["SPARKDL_OUTCOME"] == "promoted"
    assert told["SPARKDL_EXIT_CODE"] == "0"
    assert told["SPARKDL_PIPELINE"] == "shop"
    assert told["SPARKDL_REPORT"] == "/runs/r1/report.html"
    assert not caplog.records


def test_what_a_command_prints_is_seen(record, capfd):
    notify(asked("{command: \"sh -c 'echo here; echo there >&2'\"}")[0], record)
    assert capfd.readouterr().err.split() == ["here", "there"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sh -c 'exit 3'", "notify.command ended with 3"),
        ("no-such-command-anywhere", "notify.command could not be started (No such file or directory)"),
        ("sleep 60", "notify.command was ended, since it ran longer than 0.5 s"),
    ],
)
def test_a_command_that_fails_is_one_line_in_the_log(record, caplog, command, said):
    before = vars(record).copy()
    notify(asked(json.dumps({"command": command}))[0], record, seconds=0.5)
    assert [entry.message for entry in caplog.records] == [f"{said}; the run is not touched by it"]
    assert vars(record) == before


def test_a_command_that_is_ended_takes_along_what_it_started(record, tmp_path):
    mark = tmp_path / "alive"
    notify(asked(json.dumps({"command": f"sh -c '(sleep 2; touch {mark}) & wait'"}))[0], record, seconds=0.3)
    time.sleep(2.5)
    assert not mark.exists()


def test_a_command_that_does_not_listen_is_no_failure(record, caplog):
    record.settings = {"much": "x" * 1_000_000}
    notify(asked("{command: 'true'}")[0], record)
    assert not caplog.records


@pytest.mark.parametrize("outcome", ALL)
def test_only_outcomes_that_are_asked_for_are_told(record, tmp_path, outcome):
    mark = tmp_path / "told"
    record.outcome = outcome.replace("_", " ")
    for when in ([one for one in ALL if one != outcome], [outcome]):
        notify(asked(json.dumps({"command": f"touch {mark}", "when": when}))[0], record)
        assert mark.exists() == (when == [outcome])


def test_a_promotion_is_told_also_where_the_run_failed_while_it_scored(record, tmp_path):
    mark, failed = tmp_path / "told", TrainingError("no disk")
    spec = asked(json.dumps({"command": f"touch {mark}", "when": ["promoted"]}))[0]
    for model in ({"champion": 2}, {"before": 2, "version": 2, "champion": 2}, {"before": 1, "champion": 2}):
        record.model = model
        record.fail(failed)
        notify(spec, record)
        assert not mark.exists()
    record.model = {"before": None, "version": 2, "champion": 2}
    notify(spec, record)
    assert mark.exists()


def test_a_training_that_died_is_told_as_failed(record, tmp_path):
    record.fail(TrainingError("loss is not finite\nat all"))
    (tmp_path / "tell.py").write_text(PROGRAM)
    notify(asked(json.dumps({"command": f"{sys.executable} {tmp_path}/tell.py {tmp_path}/told"}))[0], record)
    told = json.loads((tmp_path / "told").read_text())[1]
    assert (told["SPARKDL_OUTCOME"], told["SPARKDL_EXIT_CODE"]) == ("failed", "3")
    assert told["SPARKDL_MESSAGE"] == "loss is not finite at all"


def test_a_webhook_gets_the_record_and_one_sentence(record, caplog):
    with Server() as server:
        notify(asked(f"{{webhook: '{server.address}/hook/{SECRET}'}}")[0], record)
    headers, body = server.seen[0]
    assert server.paths == [f"/hook/{SECRET}"]
    assert headers["Content-Type"] == "application/json"
    content = json.loads(body)
    assert content["text"] == "shop: promoted. auc 0.9 against the champion's 0.8\n/runs/r1/report.html"
    assert content["run_id"] == "r1"
    assert not caplog.records


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(record, caplog, status):
    with Server() as other, Server(status, f"{other.address}/stolen") as server:
        notify(asked(f"{{webhook: '{server.address}/{SECRET}'}}")[0], record)
    assert not other.seen
    assert f"was answered with {status}, a redirect, which is not followed" in caplog.text


@pytest.mark.parametrize("status", [400, 404, 500])
def test_a_webhook_that_refuses_is_one_line_in_the_log(record, caplog, status):
    with Server(status) as server:
        notify(asked(f"{{webhook: '{server.address}/{SECRET}'}}")[0], record)
    assert [entry.message for entry in caplog.records] == [
        f"notify.webhook (127.0.0.1) was answered with {status}; the run is not touched by it"
    ]


def test_a_server_that_answers_byte_by_byte_is_not_waited_for(record, caplog):
    with Server(drip=0.05) as server:
        began = time.monotonic()
        notify(asked(f"{{webhook: '{server.address}/x'}}")[0], record, seconds=0.5)
        waited = time.monotonic() - began
    assert "did not answer within 0.5 s" in caplog.text
    assert waited < 8  # a header every 0.05 s would have kept it for ten


def test_a_certificate_that_nobody_vouches_for_is_refused(record, caplog, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))
    with Server(context=context) as server:
        notify(asked(f"{{webhook: '{server.address}/{SECRET}'}}")[0], record)
    assert not server.seen
    assert "cannot be reached" in caplog.text
    assert "certificate" in caplog.text.lower()


def certificate(folder):
    """A key and a certificate that it signed itself, for 127.0.0.1."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "both.pem").write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return folder / "both.pem"


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("http://127.0.0.1:9/{}", " (127.0.0.1)"),
        ("http://${{HOOK_TOKEN}}.localhost:9/{}", ""),
        ("https://127.0.0.1:9/${{HOOK_TOKEN}}", " (127.0.0.1)"),
        ("https://${{HOOK}}/{}", " (127.0.0.1)"),
        ("https://${{HOOK_TOKEN:-[}}.localhost:9/{}", ""),
    ],
)
def test_nothing_of_an_address_but_its_host_is_logged_or_in_the_settings(record, caplog, address, host):
    caplog.set_level(logging.DEBUG)
    environment = {"HOOK_TOKEN": SECRET, "HOOK": "127.0.0.1:9"}
    spec, file = asked(f"{{webhook: '{address.format(SECRET)}'}}", environment)
    notify(spec, record, seconds=5)
    assert f"notify.webhook{host} " in caplog.text
    assert SECRET not in caplog.text
    assert SECRET.lower() not in caplog.text
    assert SECRET not in json.dumps(file.resolved())
    assert file.resolved()["notify"]["webhook"].endswith("(hidden)")
