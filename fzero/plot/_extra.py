"""The error for a figure that is asked for where matplotlib is not installed."""

from fzero.errors import FzeroError


class MissingExtraError(FzeroError, ImportError):
    """An optional dependency is not installed; the tables work without it."""


def missing_matplotlib() -> MissingExtraError:
    """Return the error that says how to install matplotlib.

    Example:
        >>> print(missing_matplotlib())
        a figure needs matplotlib, which is not installed.
        Usual cause: fzero was installed without its extra for plots.
        Fix: pip install 'fzero[plots]'; .table() and the HTML view need no matplotlib.
    """
    return MissingExtraError(
        "a figure needs matplotlib, which is not installed.",
        cause="fzero was installed without its extra for plots.",
        fix="pip install 'fzero[plots]'; .table() and the HTML view need no matplotlib.",
    )
