"""A killed test run leaves no processes behind."""

import signal

from tests.helpers.limits import wait_for
from tests.helpers.processes import SESSION_VARIABLE, processes_with_variable, python_process, read_line

TEST_RUN = """
import os, subprocess, sys
from tests.helpers.processes import SESSION_VARIABLE, start_process_guard
start_process_guard()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.environ[SESSION_VARIABLE], flush=True)
sys.stdin.read()
"""


def test_the_guard_kills_the_processes_of_a_killed_test_run() -> None:
    with python_process(TEST_RUN) as process:
        session = read_line(process)
        wait_for(lambda: processes_with_variable(SESSION_VARIABLE, session), 60, "child process")
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not processes_with_variable(SESSION_VARIABLE, session), 60, "end of the child process")
