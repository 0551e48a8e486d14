"""A PostgreSQL server for tests."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.deployed import free_port


def find_postgres_program(name: str) -> str:
    """Return the path of a PostgreSQL program: from PATH or Debian's newest version. Empty if there is none."""
    standard = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: float(path.parts[4]))
    return shutil.which(name) or (str(standard[-1]) if standard else "")


def _postgres_user() -> str | None:
    """Return the user to run PostgreSQL as, which refuses root. None: the current user."""
    users = {user.pw_name for user in pwd.getpwall()}
    return None if os.geteuid() else "postgres" if "postgres" in users else "nobody"


@contextmanager
def postgres_database() -> Iterator[str]:
    """Start a PostgreSQL server, and yield the URL of an empty database."""
    initdb, pg_ctl = find_postgres_program("initdb"), find_postgres_program("pg_ctl")
    user, port = _postgres_user(), free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # other users cannot read pytest's
        home = Path(name)
        options: dict[str, Any] = {"cwd": home, "check": True, "capture_output": True}
        if user:
            shutil.chown(home, user)
            options |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        command = [initdb, "--pgdata", str(home / "data"), "--username=textmill", "--auth=trust", "--no-sync"]
        subprocess.run(command, **options)
        control = [pg_ctl, "--pgdata", str(home / "data"), "--wait", "--log", str(home / "log")]
        server = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={home} -c fsync=off"
        subprocess.run([*control, "--options", server, "start"], **options | {"capture_output": False})
        try:
            yield f"postgresql+asyncpg://textmill@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*control, "--mode=fast", "stop"], **options)
