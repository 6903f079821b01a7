"""The command ``vispe``: words to calls. Parse, call, print; heavy imports wait until a command runs.

A person's mistake (a wrong name, a broken file, weights that are not there) is one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import vispe
from vispe.commands import evaluation, facts, matching, training
from vispe.commands.printing import complain


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parsed(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries' remarks about themselves
            code = options.run(options) or 0
            if sys.stdout is not None:  # it may be closed
                sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has left: `vispe list models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, MemoryError) as error:
        return complain(options.prog, error)
    except RuntimeError as error:  # torch's own word for it is no MemoryError
        if "memory" not in str(error):
            raise
        return complain(options.prog, str(error).partition("\n")[0])
    except KeyboardInterrupt:
        print(f"{options.prog}: interrupted", file=sys.stderr)
        return 130
    return code


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; overrides of a recipe, or all images of ``predict``, may stand behind options too, which argparse
    does not allow by itself."""
    top = parser()
    options, others = top.parse_known_args(argv)
    behind = getattr(options, "overrides", None)
    if options.command == "predict" and not options.images:
        behind = options.images
    if others and (behind is None or any(word.startswith("-") for word in others)):
        top.error(f"unrecognized arguments: {' '.join(others)}")
    if behind is not None:
        behind += others
    return options


class Parser(argparse.ArgumentParser):
    """Wrong words are one line too, without the usage; ``--help`` gives every default."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(complain(self.prog, f"{message} (see {self.prog} --help)"))


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = Parser(prog="vispe", description="A vision and feature-matching model zoo about position.")
    top.add_argument("--version", action="version", version=vispe.__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for family in (matching, training, evaluation, facts):
        family.declare(commands)
    return top
