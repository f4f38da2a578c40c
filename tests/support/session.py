"""A plain Python session in a pseudo-terminal, for code that people paste."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time

PROMPT, MORE = "<prompt> ", "<more> "
# what an uncaught exception prints, SyntaxError included; the echo of a line follows a prompt
ERROR = re.compile(r"^(?:Traceback |\w+(?:\.\w+)*(?:Error|Exception)\b).*", re.MULTILINE)
# prompts that no page prints, and the backend that compiles in a second
STARTUP = f"""
import sys, torch
sys.ps1, sys.ps2 = {PROMPT!r}, {MORE!r}
def quick(*args, original=torch.compile, **options):
    return original(*args, **options | {{"backend": "aot_eager", "mode": None}})
torch.compile = quick
del sys, torch, quick
"""


class Session:
    """The session; ``folder`` is its working directory, and must exist."""

    def __init__(self, folder, seconds=300, **environment):
        startup = folder / "startup.py"
        startup.write_text(STARTUP, encoding="utf-8")
        plain = {
            "PYTHONSTARTUP": str(startup),
            "PYTHON_BASIC_REPL": "1",
            "TERM": "dumb",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._seconds = seconds
        self._terminal, other = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-q"],
            stdin=other,
            stdout=other,
            stderr=other,
            cwd=folder,
            env=os.environ | plain | environment,
            start_new_session=True,
        )
        os.close(other)

    def __enter__(self):
        self._read_until(PROMPT)
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def _read_until(self, *prompts):
        """Return what is printed until one of the prompts."""
        printed, deadline = "", time.monotonic() + self._seconds
        while not printed.endswith(prompts):
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no prompt after {self._seconds} s:\n{printed}"
            printed += os.read(self._terminal, 1 << 16).decode(errors="replace")
        return printed

    def _enter(self, line):
        os.write(self._terminal, f"{line}\n".encode())
        return self._read_until(PROMPT, MORE)

    def paste(self, code):
        """Enter lines as they are, each at a prompt, and an empty one if the last is indented.

        Returns:
            what the session has printed and echoed up to the first error, or to the end.
        """
        printed = ""
        for line in code.splitlines():
            printed += self._enter(line)
            if ERROR.search(printed.replace("\r", "")):
                return printed
        return printed + self._enter("") if printed.endswith(MORE) else printed

    def leave(self):
        """End the session with Ctrl-D, and return its exit status."""
        os.write(self._terminal, b"\x04")
        try:
            while os.read(self._terminal, 1 << 16):
                pass
        except OSError:
            # Linux reports the end of a pseudo-terminal as an error
            pass
        return self._process.wait(self._seconds)


def errors(printed):
    """Return the errors in what a session has printed."""
    return ERROR.findall(printed.replace("\r", ""))
