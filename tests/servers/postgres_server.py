"""A PostgreSQL server for tests: a process of its own, in a folder of its own, on a free port of this machine."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

USER = "reader"


class Postgres:
    """A server that runs as long as the ``with`` block.

    Attributes:
        password: of the user ``reader``, who may read and write the schema ``public`` of the database ``shop``.
        url: as JDBC takes it.
    """

    @staticmethod
    def programs() -> Path | None:
        """The folder of ``postgres``, ``initdb`` and ``psql``; None where there is none."""
        packaged = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
        found = packaged[-1:] or [Path(path) for path in [shutil.which("postgres")] if path]
        return found[0].parent if found else None

    def __init__(self, programs: Path) -> None:
        self.programs, self.password = programs, f"secret-{secrets.token_hex(8)}"
        self.folder = Path(tempfile.mkdtemp(prefix="sparkdl-pg-"))  # short: a socket's path has 107 characters
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"jdbc:postgresql://127.0.0.1:{self.port}/shop"
        self._as_user = ["setpriv", "--pdeathsig", "INT"]  # it ends with us, however we end
        if os.getuid() == 0:  # whom PostgreSQL refuses to serve
            user = next(one for one in pwd.getpwall() if one.pw_name in ("postgres", "nobody"))
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._as_user += ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]

    def __enter__(self) -> Postgres:
        try:
            data = str(self.folder / "data")
            options = ["-D", data, "-U", "admin", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
            command = [*self._as_user, self.programs / "initdb", *options]
            subprocess.run(command, check=True, capture_output=True, cwd="/")
            rules = "local all admin trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
            (self.folder / "data" / "pg_hba.conf").write_text(rules)
            self.start()
            self.run(f"CREATE ROLE {USER} LOGIN PASSWORD '{self.password}'", "postgres")
            self.run(f"CREATE DATABASE shop OWNER {USER}", "postgres")
            self.run(f"ALTER SCHEMA public OWNER TO {USER}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self) -> None:
        """Start it, and wait until it answers; after ``stop``, too."""
        settings = {"fsync": "off", "listen_addresses": "127.0.0.1", "unix_socket_directories": str(self.folder)}
        told = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [*self._as_user, self.programs / "postgres", "-D", self.folder / "data", "-p", str(self.port), *told]
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        deadline = time.monotonic() + 60
        asked = [self.programs / "pg_isready", "-q", "-h", self.folder, "-p", str(self.port)]
        while subprocess.run(asked, check=False).returncode:
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {(self.folder / 'log').read_text()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it, whoever is connected."""
        self._server.send_signal(signal.SIGINT)  # a fast shutdown
        self._server.wait(60)

    def run(self, sql: str, database: str = "shop", rows: str | None = None) -> str:
        """Let the administrator run statements; return what they print.

        Args:
            sql: the statements.
            database: in which.
            rows: what ``COPY ... FROM STDIN`` reads.
        """
        command = [self.programs / "psql", "-h", self.folder, "-p", str(self.port), "-U", "admin", "-d", database]
        command += ["-v", "ON_ERROR_STOP=1", "-qAt", "-c", sql]
        done = subprocess.run(command, input=rows, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout.strip()

    def __exit__(self, *_: object) -> None:
        server = getattr(self, "_server", None)
        if server is not None and server.poll() is None:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
