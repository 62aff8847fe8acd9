"""The sink: results on stdout, everything else on stderr. How things look is decided here, once."""

import errno
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kimik3_cli.results import Result

Item = TypeVar("Item")
Update = Callable[[str], None]
SPINNER_DELAY_S = 0.5
# Characters that would move the cursor, recolour the terminal or reorder its text; newline and tab are harmless.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_STDOUT_GONE = (errno.EPIPE, errno.EBADF)


def printable(text: str) -> str:
    """Return the text with control characters as visible escapes such as \\x1b; newlines and tabs stay."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def one_line(text: str) -> str:
    """Return the text on one line, control characters escaped."""
    return printable(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def is_plain() -> bool:
    """Say whether the user asked for text without escape sequences."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


class Output:
    """Where one command's result, progress, warnings and errors go."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        """Decide the form of everything from the flags, the streams and the environment."""
        self.as_json = as_json
        self.quiet = quiet
        self.human = not as_json and _is_terminal(sys.stdout)
        self.rich_stderr = _is_terminal(sys.stderr) and not is_plain()

    def emit(self, result: "Result", view: "Callable[[], RenderableType]") -> None:
        """Write a result: its JSON, or on a terminal its picture."""
        if self.human:
            self.show(view())
        else:
            self.emit_json(result.to_json())

    def emit_json(self, text: str) -> None:
        """Write one JSON text, always UTF-8, which no Ctrl-C cuts in two; what UTF-8 cannot hold becomes an escape."""
        with _interrupts_wait():
            write_stdout((text + "\n").encode("utf-8", "backslashreplace"))

    def show(self, picture: "RenderableType") -> None:
        """Draw on the terminal, in one write."""
        console = _console(stderr=False)
        with console.capture() as capture:
            console.print(picture, crop=False)
        self.write(capture.get())

    def write(self, text: str) -> None:
        """Write text to the terminal as it is, without a newline; what its encoding cannot hold becomes an escape."""
        write_stdout(text.encode(sys.stdout.encoding, "backslashreplace"))

    @contextmanager
    def open_line(self) -> Iterator[None]:
        """While text comes piece by piece: if that is cut short, end the line, so that what follows starts another."""
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            if not is_complete:
                self.write("\n")

    def as_they_come(self, label: str, work: Callable[[Update], Iterator[Item]]) -> Iterator[Item]:
        """Yield what the engine yields; as in `working` while it works, the spinner until the first item."""
        with self.working(label) as update:
            items = work(update)
            item = next(items, None)
        while item is not None:
            yield item
            with redirect_stdout(sys.stderr):
                item = next(items, None)

    @contextmanager
    def working(self, label: str) -> Iterator[Update]:
        """Keep stdout clean while the engine works; on a terminal show a spinner when that takes long.

        Yields a function that changes the spinner's label.
        """
        with redirect_stdout(sys.stderr), self._spinner(label) as update:
            yield update

    def warning(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Show a library's warning as one line; takes the place of warnings.showwarning."""
        if not self.quiet:
            _write_stderr(f"kimik3: warning: {one_line(str(message))}\n")

    def error(self, kind: str, message: str, trace: str = "") -> None:
        """Report a failure as the last line of stderr, after its traceback if there is one to show."""
        message = one_line(message)
        _write_stderr(trace)
        if self.as_json:
            _write_stderr(json.dumps({"error": {"kind": kind, "message": message}}) + "\n")
        elif self.rich_stderr:
            from rich.text import Text

            line = Text.assemble(("kimik3: error: ", "bold red"), message)
            _console(stderr=True).print(line, soft_wrap=True)
        else:
            _write_stderr(f"kimik3: error: {message}\n")

    @contextmanager
    def _spinner(self, label: str) -> Iterator[Update]:
        if self.quiet or not self.rich_stderr:
            yield lambda text: None
            return
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        spinner = Spinner("dots", Text(label))
        live = Live(
            spinner, console=_console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
        )
        start = Timer(SPINNER_DELAY_S, live.start)
        start.daemon = True
        start.start()
        try:
            yield lambda text: spinner.update(text=Text(text))
        finally:
            start.cancel()
            start.join()
            live.stop()


def write_stdout(data: bytes) -> None:
    """Write all bytes to stdout and flush.

    Raises:
        BrokenPipeError: whoever read stdout has closed it, or it was never open.
    """
    if sys.stdout is None:
        raise BrokenPipeError(errno.EPIPE, "stdout is closed")
    remaining = memoryview(data)
    try:
        sys.stdout.flush()
        while remaining:  # an unbuffered stdout may take a part only
            remaining = remaining[sys.stdout.buffer.write(remaining) :]
        sys.stdout.buffer.flush()
    except OSError as error:
        abandon_stdout()
        if error.errno in _STDOUT_GONE:
            raise BrokenPipeError(error.errno, "stdout is closed") from None
        raise OSError(error.errno, error.strerror, "stdout") from None


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Hold Ctrl-C back while something is written that must not be cut in two."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or current_thread() is not main_thread():  # ignored, or another thread's business
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *interrupt: held.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        before(*held[0])


def abandon_stdout() -> None:
    """Let whatever is still buffered vanish, so that the interpreter's exit does not fail on a closed stdout."""
    if sys.stdout is None:
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


@contextmanager
def library_noise(output: Output) -> Iterator[None]:
    """Route warnings to the sink, and with --quiet silence the libraries' log messages."""
    import logging

    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.showwarning = output.warning
        logging.disable(logging.WARNING if output.quiet else before)
        try:
            yield
        finally:
            logging.disable(before)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _console(*, stderr: bool) -> "Console":
    from rich.console import Console

    colors: Literal["auto"] | None = None if is_plain() else "auto"
    return Console(stderr=stderr, color_system=colors, highlight=False, markup=False, emoji=False)


def _write_stderr(text: str) -> None:
    """Write text to stderr, whether or not anybody is there to read it."""
    if sys.stderr is None:
        return
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
