"""What `optimizer.state` is while an engine has the optimizer: it holds nothing, and says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NoReturn
from weakref import WeakMethod

from fzero.errors import PhaseError


class OptimizerStateOfEngine(MutableMapping[Any, Any]):
    """In the place of a torch.optim optimizer's `state`: `clear()` clears, all else raises.

    What the optimizer keeps is in the engine's state, sharded over the ranks. A read would be a
    collective, and what is written into the copies that it gives would be lost.
    """

    def __init__(self, clear: WeakMethod[Callable[[], None]]) -> None:
        self._clear = clear

    def clear(self) -> None:
        """Begin anew: every parameter is as before its first step. A collective."""
        clear = self._clear()
        if clear is None:
            raise _is_elsewhere("state.clear(), after its engine is gone,")
        clear()

    def __getitem__(self, key: Any) -> NoReturn:
        raise _is_elsewhere("state[p]")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise _is_elsewhere("state[p] = ...")

    def __delitem__(self, key: Any) -> NoReturn:
        raise _is_elsewhere("state, del [p],")

    def __iter__(self) -> Iterator[Any]:
        raise _is_elsewhere("state, a loop over it,")

    def __len__(self) -> int:
        raise _is_elsewhere("state, its length,")

    def __contains__(self, key: object) -> bool:
        raise _is_elsewhere("state, whether p is in it,")

    def __reduce__(self) -> NoReturn:
        raise _is_elsewhere("state, a copy of it,")

    def __repr__(self) -> str:
        return "<in engine.state, sharded>"


def _is_elsewhere(seen: str) -> PhaseError:
    return PhaseError(
        f"optimizer.{seen} of an optimizer that an engine runs.",
        cause="a loop of before the engine, or a tool that looks into the optimizer: what it keeps "
        "is in engine.state, sharded over the ranks.",
        fix="engine.full_optimizer_state(path, name) gives a whole value, full_optimizer_states() "
        "all of them, set_full_optimizer_state(path, name, value) writes one, each on all ranks; "
        "optimizer.state.clear() begins anew. fzero.checkpoint.save(path, engine.state) saves.",
    )
