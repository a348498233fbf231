"""`python -m fzero train | certify | plan | doctor | info`: the job, what holds, what it costs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fzero.certify import _command as certifying
from fzero.doctor import _command as examining
from fzero.errors import FzeroError
from fzero.job import info, settings
from fzero.job.stop import exit_code
from fzero.job.train import train
from fzero.plan import _command as planning

_COMMANDS: dict[str, Any] = {"certify": certifying, "doctor": examining, "plan": planning}


def _parser(*, launched: bool) -> argparse.ArgumentParser:
    # No abbreviations anywhere: a mistyped option must not pass as the short form of another.
    parser = argparse.ArgumentParser(
        prog="python -m fzero", description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    about = commands.add_parser(
        "info", help="report versions, backends, cores and GPUs", allow_abbrev=False
    )
    about.add_argument("--json", action="store_true", help="as JSON")
    about.set_defaults(run=lambda given: info.show(as_json=given["json"]))
    job = commands.add_parser(
        "train",
        help="train a byte-level GPT on the standard library; also under torchrun",
        description="Train a byte-level GPT on the source of the Python standard library. "
        "On several ranks: torchrun --nproc-per-node 2 -m fzero train ...",
        epilog="Ctrl-C or SIGTERM ends the run after the step that runs, with a checkpoint and "
        "the command that continues it; the "
        "exit code is then 130 or 143, under torchrun 0. Wrong input: 2. A loss or "
        "gradient of any rank that is not finite: 2 on every rank; the message names the step, the "
        "rank and the parameter.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    settings.add_options(job)
    job.set_defaults(run=lambda given: exit_code(train(given) or 0, launched=launched))
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

    0, 1 where a matrix has a cell that fails, 2 after an error, 128 + signal when stopped.
    """
    launched = dist.is_torchelastic_launched()
    parser = _parser(launched=launched)
    given = vars(parser.parse_args(argv))
    if given.pop("command") is None:
        parser.print_help()
        return 0
    try:
        return given.pop("run")(given) or 0
    except FzeroError as error:
        print(f"fzero, rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # a run that has begun to train ends by itself, with a checkpoint
        print("fzero: interrupted, nothing was saved", file=sys.stderr)
        return exit_code(signal.SIGINT, launched=launched)


if __name__ == "__main__":
    sys.exit(main())
