"""The command line of the job."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import torch.distributed as dist

import fzero
from train.machines import LAUNCH
from train.settings import add_options
from train.stop import exit_code
from train.train import train


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; only options that are given appear in the namespace."""
    # No abbreviations: a mistyped option must not pass as the short form of another.
    parser = argparse.ArgumentParser(
        prog="python examples/train",
        description="Train a byte-level GPT on the source of the Python standard library. "
        "On several ranks: torchrun --nproc-per-node 2 examples/train ...",
        epilog="Ctrl-C or SIGTERM ends the run after the step that runs, with a checkpoint and "
        "the command that continues it; the exit code is then 130 or 143, under torchrun 0. "
        "Wrong input: 2. A loss or gradient of any rank that is not finite: 2 on every rank; the "
        "message names the step, the rank and the parameter.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return its exit code: 0, 2 after an error, 128 + signal when stopped."""
    launched = dist.is_torchelastic_launched() and LAUNCH not in os.environ
    try:
        return exit_code(train(vars(make_parser().parse_args(argv))), launched=launched)
    except fzero.FzeroError as error:
        print(f"fzero, rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # a run that has begun to train ends by itself, with a checkpoint
        print("interrupted, nothing was saved", file=sys.stderr)
        return exit_code(signal.SIGINT, launched=launched)
