"""Differences between a terminal and a pipe: width, colour, and signs of progress."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from graphrun.errors import Interrupted
from graphrun.reading import printable

if TYPE_CHECKING:
    from rich.console import Console

# styles of rich, and the words of plain-text screens that get them
COLOURS = (
    ("bold green", r"(?m)^(?:fits: yes|done|ok|ready)\b"),
    ("bold red", r"(?m)^(?:fits: no|infeasible)\b|more than planned|does not fit\b"),
    ("cyan", r"(?m)(?<=: )graphrun (?:.*\\\n)*.*$"),
    ("bold", r"(?m)^ (?:#|phase|slot|component|budget) .*$"),
    ("green", "█+"),
    ("yellow", "▒+"),
    ("blue", "░+"),
    ("dim", r"(?m)^ (?:sizes|weights|█|-v|why) .*$"),
)
WIDEST = 120  # columns; longer lines are hard to read
SOON_SECONDS = 1.0  # activities that take no longer are not shown


def width() -> int:
    """Return the width of screens: the columns of the terminal or of $COLUMNS; 80 in a pipe."""
    return max(80, min(WIDEST, shutil.get_terminal_size().columns))


def print_coloured(screen: str, *, err: bool = False) -> None:
    """Print ``screen`` to stdout, or to stderr. Coloured on a terminal, plain in a pipe or with
    $NO_COLOR. Control characters are escaped: names in it may come from a file."""
    if not (sys.stderr if err else sys.stdout).isatty():
        typer.echo(printable(screen), err=err)
        return
    from rich.console import Console

    print_to(Console(stderr=err), screen)


def print_to(console: Console, screen: str) -> None:
    """Print ``screen`` to ``console`` in its colours."""
    from rich.text import Text

    text = Text(printable(screen))
    for style, words in COLOURS:
        text.highlight_regex(words, style)
    console.print(text, soft_wrap=True)


@contextlib.contextmanager
def alive(activity: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show ``activity`` on stderr: a spinner on a terminal, or one line after a second in a pipe.

    Yields a function to call with the text of each further step, which is shown after ``activity``.
    Raises Interrupted, which names ``activity``, for Ctrl-C that is not handled inside.
    """
    try:
        with _show_steps(activity, quiet=quiet) as step:
            yield step
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted ({activity}): there is no result yet") from None


@contextlib.contextmanager
def _show_steps(activity: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status(Text(printable(activity))) as status:
            yield lambda step: status.update(Text(printable(f"{activity}: {step}")))
    else:
        timers = list[threading.Timer]()

        def start_timer(text: str) -> None:
            for timer in timers:
                timer.cancel()
            timers[:] = [
                threading.Timer(SOON_SECONDS, lambda: typer.echo(f"  {printable(text)}", err=True))
            ]
            timers[0].daemon = True
            timers[0].start()

        start_timer(activity)
        try:
            yield lambda step: start_timer(f"{activity}: {step}")
        finally:
            timers[0].cancel()
