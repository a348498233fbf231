"""The graphs of a file, run in the place of a step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
from torch import Tensor

from fzero.compile._encode import Json, decoded, decoded_graph
from fzero.compile._file import read
from fzero.compile._fit import require_fit, schedules_of
from fzero.compile._run import Backend, Compiled, Returns, compiled
from fzero.errors import LayoutError
from fzero.mesh import Axis
from fzero.state import NAMESPACE
from fzero.transforms._states import flatten_states


@dataclass(frozen=True, slots=True)
class Exported:
    """A file of graphs."""

    path: Path
    content: dict[str, Any]

    def fitted(self, arguments: Any, axis: Axis, backend: Backend) -> Compiled:
        """Return what this rank runs. Raises `LayoutError` if it is not for these arguments."""
        require_fit(self.path, self.content["facts"], arguments)
        lines = self.content["graphs"][self.content["ranks"][axis.rank]]
        schedules = schedules_of(flatten_states("compile", arguments[0])[0])
        try:
            graph = decoded_graph(lines, schedules)
        except LookupError as error:
            raise LayoutError(
                f"{self.path} needs {error}, which is not here.",
                cause="an op of a library that this program has not imported.",
                fix="import the library before the first call.",
            ) from error
        count = len(optree.tree_leaves(arguments[0], namespace=NAMESPACE))
        donated = [(i, i) for i in range(count)] if self.content["donate"] else None
        return compiled(graph, _returns(self.content["aux"]), axis, backend, donated)


def exported_in(path: str | os.PathLike[str], step: str, *, donate: bool) -> Exported:
    """Read a file. Raises `LayoutError` if it is damaged, or made of another step."""
    file = Exported(Path(path), read(Path(path)))
    known = file.content["step"], file.content["donate"]
    if known != (step, donate):
        raise LayoutError(
            f"{path} was made of {known[0]}, and this step is {step}.",
            cause="a file of another step, or of one with other transforms.",
            fix="export this step, or wrap it as it was when the file was written.",
        )
    return file


def _returns(aux: Json) -> Returns:
    def returns(states: Any, tensors: list[Tensor]) -> Any:
        treespec: Any = optree.tree_structure(states, namespace=NAMESPACE)
        made: Any = optree.tree_unflatten(treespec, tensors[: treespec.num_leaves])
        return made, decoded(aux, lambda _, number: tensors[number])

    return returns
