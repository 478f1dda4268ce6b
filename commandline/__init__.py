"""What all command lines share: errors in one line, pipes that close early, exit codes."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

TOO_LARGE = "a time or a size in these flags or this trace passes 64 bits"


class UsageError(Exception):
    """Input that cannot be run, in one line."""


class Parser(argparse.ArgumentParser):
    """Errors in one line, and no flag by its beginning: tomorrow that may be another's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


@contextmanager
def user_input() -> Iterator[None]:
    """A ``ValueError`` about what the user gave becomes a ``UsageError``; outside of this it is a bug of
    ours."""
    try:
        yield
    except OverflowError as error:
        raise UsageError(TOO_LARGE) from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def run(command: Callable[[], int]) -> int:
    """The exit code of a command: its own (0 ran, 1 what was asked does not hold), 2 for a
    ``UsageError``, 130 for an interrupt."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without block characters gets "?"
        sys.stdout.reconfigure(errors="replace")
    try:
        code = command()
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        _mute()
        return 0
    except OSError as error:
        print(
            f"error: standard output cannot be written: {error.strerror or error}", file=sys.stderr
        )
        _mute()
        return 2


def _mute() -> None:
    """Nothing more comes out: the interpreter flushes once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
