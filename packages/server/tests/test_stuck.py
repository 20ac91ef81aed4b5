"""A process whose interpreter is blocked ends by itself; one that works does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

LIMIT_S = 0.3
SCRIPT = f"""
import time
from pagewood.engine.text import ChatTemplate
from pagewood.server.processes.stuck import end_when_stuck

end_when_stuck({LIMIT_S})
end_s = time.monotonic() + 3 * {LIMIT_S}
while time.monotonic() < end_s:
    pass
print("still alive", flush=True)
secret = [{{"role": "user", "content": "a secret"}}]
# Two lists of 2**60 elements that share their parts: one comparison in C, which no other thread can interrupt.
loop = "{{% for i in range(60) %}}{{% set ns.a = [ns.a, ns.a] %}}{{% set ns.b = [ns.b, ns.b] %}}{{% endfor %}}"
source = "{{% set ns = namespace(a=[messages[0].content], b=[messages[0].content]) %}}" + loop + "{{{{ ns.a == ns.b }}}}"
ChatTemplate(source, special_tokens={{}}, max_seconds=0.1).render(secret)
print("ended")
"""  # noqa: E501


def test_a_blocked_interpreter_ends_its_process() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGPROF, done.stderr
    assert done.stdout.splitlines() == ["still alive"]
    assert "in render" in done.stderr
    assert "secret" not in done.stderr


BUSY = f"""
import select
import sys
from pagewood.server.processes.stuck import end_when_stuck

end_when_stuck({LIMIT_S})
print("ready", flush=True)
while True:
    while not select.select([sys.stdin], [], [], 0)[0]:
        pass
    line = sys.stdin.readline()
    if not line:
        break
    print(line, end="", flush=True)
"""


def test_a_process_that_stood_still_with_its_machine_does_not_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(3):
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(3 * LIMIT_S)  # longer than the limit
            os.kill(process.pid, signal.SIGCONT)
            process.stdin.write("still there\n")
            process.stdin.flush()
            assert process.stdout.readline() == "still there\n"
        process.stdin.close()
    assert process.returncode == 0
