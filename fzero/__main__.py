"""`python -m fzero certify | plan | doctor | info`: what holds, what it costs, what is there."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

from fzero.errors import FzeroError, explain
from fzero.tools import doctor
from fzero.tools.certify import command as certifying
from fzero.tools.plan import command as planning

_COMMANDS: dict[str, Any] = {"certify": certifying, "doctor": doctor, "plan": planning}


def _train_is_gone(options: Sequence[str]) -> str:
    """Say what takes the place of `python -m fzero train`, with the options that were given."""
    given = shlex.join(options)
    args = f" ARGS={shlex.quote(given)}" if options else ""
    return explain(
        "python -m fzero train: the library has no trainer inside any more.",
        cause="a command of an older fzero; the job is examples/train of its repository.",
        fix=f"there, `make train{args}`; on two ranks, `torchrun --nproc-per-node 2 "
        f"{f'examples/train {given}'.strip()}`.",
    )


def _parser() -> argparse.ArgumentParser:
    # No abbreviations anywhere: a mistyped option must not pass as the short form of another.
    parser = argparse.ArgumentParser(
        prog="python -m fzero", description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    about = commands.add_parser(
        "info", help="report versions, backends, cores and GPUs", allow_abbrev=False
    )
    about.add_argument("--json", action="store_true", help="as JSON")
    about.set_defaults(run=lambda given: doctor.show_environment(as_json=given["json"]))
    for name, command in _COMMANDS.items():
        one = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            epilog=command.EPILOG,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        command.add_options(one)
        one.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    0, 1 where a matrix has a cell that fails, 2 after an error, 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "train":
        print(_train_is_gone(argv[1:]), file=sys.stderr)
        return 2
    parser = _parser()
    given = vars(parser.parse_args(argv))
    if given.pop("command") is None:
        parser.print_help()
        return 0
    try:
        return given.pop("run")(given) or 0
    except FzeroError as error:
        print(f"fzero, rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fzero: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
