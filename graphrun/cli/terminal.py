"""What differs between a terminal and a pipe: the width, colour, and a sign of life of what takes
over a second."""

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

# Colours of screens, which are plain text: what is coloured is found by its words. Styles are those
# of rich.
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
WIDEST = 120  # columns of a sentence: longer ones are hard to read
SOON_SECONDS = 1.0  # what takes no longer is not told


def width() -> int:
    """The columns that screens are made for: those of the terminal, or of $COLUMNS; 80 in a
    pipe."""
    return max(80, min(WIDEST, shutil.get_terminal_size().columns))


def coloured(screen: str, *, err: bool = False) -> None:
    """Prints ``screen`` to stdout, or to stderr: in colour on a terminal, plain in a pipe and with
    $NO_COLOR.

    Characters that a terminal would act on are escapes: names in it may come from a file.
    """
    if not (sys.stderr if err else sys.stdout).isatty():
        typer.echo(printable(screen), err=err)
        return
    from rich.console import Console

    print_to(Console(stderr=err), screen)


def print_to(console: Console, screen: str) -> None:
    """Prints ``screen`` to ``console``, in its colours."""
    from rich.text import Text

    text = Text(printable(screen))
    for style, words in COLOURS:
        text.highlight_regex(words, style)
    console.print(text, soft_wrap=True)


@contextlib.contextmanager
def alive(what: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A context that shows on stderr what takes so long: a spinner on a terminal, and in a pipe one
    line after a second.

    Yields a function to be called with the text of each further step, which is shown after ``what``
    in the same way. Raises Interrupted, which names ``what``, for Ctrl-C that is not handled
    inside.
    """
    try:
        with _shown(what, quiet=quiet) as step:
            yield step
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted ({what}): there is no result yet") from None


@contextlib.contextmanager
def _shown(what: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status(Text(printable(what))) as status:
            yield lambda step: status.update(Text(printable(f"{what}: {step}")))
    else:
        running = list[threading.Timer]()

        def tell(text: str) -> None:
            for timer in running:
                timer.cancel()
            running[:] = [
                threading.Timer(SOON_SECONDS, lambda: typer.echo(f"  {printable(text)}", err=True))
            ]
            running[0].daemon = True
            running[0].start()

        tell(what)
        try:
            yield lambda step: tell(f"{what}: {step}")
        finally:
            running[0].cancel()
