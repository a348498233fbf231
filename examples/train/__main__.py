"""`python examples/train`: a folder that is run puts itself on the path, and not its parent."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from train.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
