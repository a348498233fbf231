"""The exceptions of fzero: four kinds, each also the builtin kind a caller would expect."""


class FzeroError(Exception):
    """Base of every error that fzero raises on purpose."""


class LayoutError(FzeroError, ValueError):
    """Parameters, batches or options that do not fit together; nothing was changed."""


class PhaseError(FzeroError, RuntimeError):
    """A call that is not legal in the phase the state is in; the state is still good."""


class DonatedError(PhaseError):
    """A state (or its gradients) was used again after its buffers were donated."""


class AxisError(FzeroError, RuntimeError):
    """The axis of ranks is missing, of another size, or its ranks do different things."""


class PeerFailedError(AxisError):
    """Another rank raised; no other rank needs to be told."""


class MismatchError(AxisError, PhaseError):
    """The ranks make different calls, or the same one with other options; all of them raise."""


def explain(seen: str, *, cause: str, fix: str) -> str:
    """Return the house's error text: what was seen, its usual cause, and the fix.

    Example:
        >>> print(explain("2 ranks, a state of 4.", cause="two meshes.", fix="pass one."))
        2 ranks, a state of 4.
        Usual cause: two meshes.
        Fix: pass one.
    """
    return f"{seen}\nUsual cause: {cause}\nFix: {fix}"
