"""Entry point of the console script and of `python -m kimik3_cli`."""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
# Code that runs while the program is still starting: there an exception may be swallowed or wrapped on its way out.
STARTING = ("<frozen importlib", f"{os.sep}pydantic{os.sep}")
SHOW_CURSOR = "\x1b[?25h"


def run() -> int:
    """Run the command line of this process and return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where interrupts are ignored, as by nohup
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        from kimik3_cli.cli.app import main

        return main()
    except KeyboardInterrupt:
        return INTERRUPTED


def on_interrupt(number: int, frame: FrameType | None) -> None:
    """End the process at once while it is still importing; afterwards raise KeyboardInterrupt as usual."""
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in STARTING):
            if sys.stderr is not None and sys.stderr.isatty():
                os.write(sys.stderr.fileno(), SHOW_CURSOR.encode())  # a spinner may have hidden it
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(run())
