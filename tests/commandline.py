"""Runs kimik3 as users do: the installed program, piped or on a pseudo-terminal."""

import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path
from select import select
from typing import Any, NamedTuple

_SCRIPT = Path(sys.executable).with_name("kimik3")
PROGRAM = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-m", "kimik3_cli"]
TIMEOUT_S = 300
_OWN = ("KIMIK3_CHECKPOINT", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "PYTHONWARNINGS", "TRITON_INTERPRET")


class Ran(NamedTuple):
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str


def environment(**variables: str) -> dict[str, str]:
    """The environment of this process less what changes kimik3's output, plus `variables`; never online."""
    kept = {name: value for name, value in os.environ.items() if name not in _OWN}
    return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **variables}


def run(*words: str | bytes | Path, stdin: bytes = b"", folder: Path | None = None, **variables: str) -> Ran:
    """Run with pipes for all three streams; bytes that are not UTF-8 fail the test."""
    command = [*PROGRAM, *words]
    done = subprocess.run(
        command, input=stdin, capture_output=True, cwd=folder, env=environment(**variables), timeout=TIMEOUT_S
    )
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def run_on_terminal(*words: str | Path, columns: int = 80, folder: Path | None = None, **variables: str) -> Ran:
    """Run with stdin and stderr on one pseudo-terminal and stdout on another; line ends become \\n."""
    process, out, err = _start_on_terminal(*words, columns=columns, folder=folder, **variables)
    return _ran(process, *_read_all(out, err))


def interrupt_on_terminal(*words: str | Path, **variables: str) -> Ran:
    """Like `run_on_terminal`, but press Ctrl-C as soon as something has been written to stdout."""
    process, out, err = _start_on_terminal(*words, columns=80, folder=None, **variables)
    ready, _, _ = select([out], [], [], TIMEOUT_S)
    assert ready, "the program wrote nothing"
    process.send_signal(signal.SIGINT)
    return _ran(process, *_read_all(out, err))


def _ran(process: subprocess.Popen[bytes], out: bytes, err: bytes) -> Ran:
    return Ran(process.wait(TIMEOUT_S), *(text.decode().replace("\r\n", "\n") for text in (out, err)))


def _start_on_terminal(
    *words: str | Path, columns: int, folder: Path | None, **variables: str
) -> tuple[subprocess.Popen[bytes], int, int]:
    """Return the process and where to read its stdout and its stderr."""
    err, err_end = _terminal(columns)
    out, out_end = _terminal(columns)
    process = subprocess.Popen(
        [*PROGRAM, *map(str, words)],
        stdin=err_end,
        stdout=out_end,
        stderr=err_end,
        cwd=folder,
        env=environment(**variables),
        start_new_session=True,
    )
    os.close(out_end)
    os.close(err_end)
    return process, out, err


def _terminal(columns: int) -> tuple[int, int]:
    """Return (end to read from, end for the program)."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    return master, slave


def _read_all(*descriptors: int) -> list[bytes]:
    """Read all descriptors until their writers have closed them."""
    written = {descriptor: b"" for descriptor in descriptors}
    is_open = set(descriptors)
    while is_open:
        ready, _, _ = select(list(is_open), [], [], TIMEOUT_S)
        assert ready, "the program neither wrote nor ended"
        for descriptor in ready:
            data = _read(descriptor)
            written[descriptor] += data
            if not data:
                is_open.remove(descriptor)
                os.close(descriptor)
    return [written[descriptor] for descriptor in descriptors]


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux reports that the last program on a pseudo-terminal has closed it
        return b""


def error_line(err: str) -> str:
    """The message of a failed command, which must have written exactly one line to stderr."""
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert err.startswith("kimik3: error: "), err
    return err.removeprefix("kimik3: error: ").rstrip("\n")


def refused(ran: Ran, code: int) -> str:
    """The message of a command that failed with this code: nothing on stdout, one line on stderr."""
    assert (ran.code, ran.out) == (code, "")
    return error_line(ran.err)


def answer(ran: Ran) -> dict[str, Any]:
    """The result of a command that succeeded: one JSON object, indent 2, a newline at the end, stderr empty."""
    assert (ran.code, ran.err) == (0, "")
    result: dict[str, Any] = json.loads(ran.out)
    assert ran.out == json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    return result
