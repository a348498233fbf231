"""`python -m benchmarks`, what `make bench` runs: the one-step benchmark."""

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    program = Path(__file__).with_name("bench_step.py")
    sys.exit(subprocess.call([sys.executable, str(program), *sys.argv[1:]]))
