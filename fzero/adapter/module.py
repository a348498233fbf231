"""A module's parameters, moved onto the buffers of a state, and moved back.

below stage 3   every parameter has the memory of a part of its group's flat, as a storage of its
                own: what is saved or copied of it is that part
at stage 3      every parameter is a placeholder; this rank has a shard of its group
encoded         a parameter is a placeholder at every stage
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import eq, is_
from typing import Any

import torch
from torch import Tensor, nn

from fzero.collectives import performer_of
from fzero.errors import LayoutError
from fzero.machine.packing import unpack, with_own_storage
from fzero.machine.placeholder import LazyParam, not_for_jit
from fzero.options import Initializer
from fzero.state import Layout, Setup
from fzero.transforms.init import made_by


class ModuleParameters:
    """The parameter objects of a module, by the leaves of a layout.

    own: paths of buffers that each rank has for itself. initializer: what makes values, if it is
    there. learning: every object that learns, and the leaf that it is. all_objects: every object.
    Both as they were when `remember` was called.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        own: Collection[str] = (),
        initializer: Initializer | None = None,
    ) -> None:
        self.module, self.layout, self.own = module, layout, own
        self.initializer = initializer
        # Who owns a parameter stays its owner, also where the user puts another part in its place.
        self._parts = dict(module.named_modules(remove_duplicate=False))
        self.paths: dict[int, list[str]] = {}  # leaf -> all paths that it has
        names = dict(module.named_parameters(remove_duplicate=False))
        for path, leaf in zip(names, layout.slots, strict=True):
            self.paths.setdefault(leaf, []).append(path)

    def objects(self, leaf: int) -> list[Tensor]:
        """Every parameter object that is this leaf: one, or several on the same memory."""
        found = [self.at(path) for path in self.paths[leaf]]
        return list({id(p): p for p in found}.values())

    def at(self, path: str) -> Tensor:
        """The module's parameter at `path`, as it is now."""
        owner, _, name = path.rpartition(".")
        return getattr(self._parts[owner], name)

    def values(self, index: int) -> Iterator[Tensor]:
        """Make the full leaves of a group, one after another."""
        for number in self.layout.groups[index].leaves:
            x = self.objects(number)[0].detach()
            x = x if isinstance(x, LazyParam) else Tensor.as_subclass(x, Tensor)
            yield made_by(self.layout.leaves[number], x, self.initializer)

    @torch.no_grad()
    def have(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Let a group's parameters, which are whole, have the values and memory of `tensors`."""
        for leaf, view in zip(self.layout.groups[index].leaves, tensors, strict=True):
            own = with_own_storage(view)
            for path in self.paths[leaf]:
                p = self.at(path)
                if type(p.data) is Tensor and p.device == own.device:
                    p.data = own
                else:  # made under sharded_init; or somebody moved it, a stand-in of p.grad, too
                    p.grad = p.grad if p.device == own.device else None
                    self._assign(path, in_place_of(p, own))

    def follow(self, setup: Setup, index: int, flat: Tensor) -> None:
        """Let a group's parameters have the memory of its new flat; where ranks cut it, none."""
        if setup.is_read_lazily(index):
            self.let_go(index)
        else:
            self.have(index, unpack(setup.layout, index, flat))

    @torch.no_grad()
    def let_go(self, index: int) -> None:
        """Free the memory of a group's parameters, which placeholders replace soon.

        Code that holds a parameter which cannot be swapped reads NaN from then on.
        """
        for leaf in self.layout.groups[index].leaves:
            for p in self.objects(leaf):
                if type(p.data) is Tensor:
                    has_nan = p.is_floating_point() or p.is_complex()
                    nothing = float("nan") if has_nan else 0
                    p.data = p.data.new_full((), nothing).expand(p.shape)

    def place(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Put `tensors` (placeholders, or whole tensors) where a group's parameters are."""
        for leaf, value in zip(self.layout.groups[index].leaves, tensors, strict=True):
            made: dict[int, nn.Parameter] = {}
            for path in self.paths[leaf]:
                old = self.at(path)
                if id(old) not in made:
                    made[id(old)] = in_place_of(old, value)
                self._assign(path, made[id(old)])

    def _assign(self, path: str, p: nn.Parameter) -> None:
        owner, _, name = path.rpartition(".")
        module = self._parts[owner]
        if getattr(module, name) is not p:
            setattr(module, name, p)
        if isinstance(module, nn.RNNBase):
            _keep_apart(module, isinstance(p, LazyParam))

    # What may have happened to them since.

    def remember(self) -> None:
        """Note which objects the parameters are, and where: for `require_same`."""
        leaves = enumerate(self.layout.leaves)
        self.learning = [(p, i) for i, leaf in leaves if leaf.trainable for p in self.objects(i)]
        self.all_objects = [p for leaf in self.paths for p in self.objects(leaf)]
        # A row for each name: the dict that has it, its name there, its path.
        self._rows = [
            (owner._parameters, name, f"{prefix}.{name}".lstrip("."))
            for prefix, owner in self.module.named_modules()
            for name, p in owner._parameters.items()
            if p is not None
        ]
        self._objects: list[Any] = [held[name] for held, name, _ in self._rows]
        self._frozen = [i for i, p in enumerate(self._objects) if not p.requires_grad]
        self._pointers = _addresses(self._objects)
        self._remember_parts()

    def _remember_parts(self) -> None:
        """Note the dicts of all parts, of parameters and of parts, and what is in them."""
        every = self.module.modules()
        self._dicts = [held for part in every for held in (part._parameters, part._modules)]
        self._members = _members(self._dicts)

    def require_same_memory(self) -> None:
        """Raise for a parameter that was replaced or moved: it would not be trained."""
        there = [held.get(name) for held, name, _ in self._rows]
        pointers = _addresses(self._objects)
        same = list(map(is_, there, self._objects))
        if all(same) and pointers == self._pointers:
            return
        if not all(same):
            raise self._refused(
                same.index(False),
                "is another tensor now than when",
                "torch.export or torch.jit of it, where engine.close() comes first; an assignment, "
                'module.to("meta") or load_state_dict(assign=True)',
            )
        raise self._refused(
            list(map(eq, pointers, self._pointers)).index(False),
            "has other memory now than when",
            "`p.data = x`, module.half(), .to(...) or share_memory()",
        )

    def moved_away(self) -> list[int]:
        """Return the groups of parameters that have other memory, of the same shape, as before."""
        found, leaves = set[int](), {id(p): i for i in self.paths for p in self.objects(i)}
        for p, pointer in zip(self._objects, self._pointers, strict=True):
            leaf = leaves.get(id(p), -1)
            if _addresses([p]) != [pointer] and self.layout.leaves[leaf].shape == p.shape:
                found.add(leaf)
        groups = enumerate(self.layout.groups)
        return [index for index, group in groups if not found.isdisjoint(group.leaves)]

    def require_same(self) -> None:
        """Raise for a parameter that was replaced, moved, added or unfrozen: it is not trained."""
        self.require_same_memory()
        self.require_none_added()
        for i in self._frozen:
            if self._objects[i].requires_grad:
                raise LayoutError(
                    f"{self._rows[i][2]} requires grad now, unlike when the engine was made.",
                    cause="requires_grad_(True) after Engine(...), which keeps no gradient and no "
                    "optimizer state of what was frozen then.",
                    fix="make the engine while it learns, and freeze it right after: "
                    "p.requires_grad_(True), Engine(...), p.requires_grad_(False). It is not "
                    "stepped until requires_grad_(True). Or close() this engine, and make another.",
                )

    def require_none_added(self) -> None:
        """Raise for a parameter that learns and that the engine was not made of.

        Another part without such parameters, or one that has those of before, is taken.
        """
        there = _members(self._dicts)
        if len(there) == len(self._members) and all(map(is_, there, self._members)):
            return
        known = {*map(id, self._objects)}
        for path, p in self.module.named_parameters():
            if p.requires_grad and id(p) not in known:
                raise LayoutError(
                    f"{path} was not there when the engine was made.",
                    cause="a part of the module that was replaced or added after Engine(...), as "
                    "model[1] = nn.Linear(...): in no buffer of the engine, and in none of its "
                    "param groups, so that it would not be trained, and be another on each rank.",
                    fix="engine.close(), then change the module, optimizer.add_param_group(...), "
                    "and make a new Engine of both. A part that does not learn needs "
                    "requires_grad_(False).",
                )
        self._remember_parts()

    def _refused(self, index: int, seen: str, cause: str) -> LayoutError:
        return LayoutError(
            f"{self._rows[index][2]} {seen} the engine was made.",
            cause=f"{cause} after Engine(...): the engine's buffers know nothing of it.",
            fix="make the engine when the module is as it will be, or close() it and make "
            "another; write values with p.copy_(x) under no_grad, or at stage 3 with "
            "fzero.adapter.gathered(module, modify=True).",
        )


def _members(dicts: Sequence[Any]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, dicts))]


def _addresses(objects: Sequence[Any]) -> list[int]:
    """Where parameters are; nowhere if they are placeholders."""
    return [0 if isinstance(p, LazyParam) else Tensor.data_ptr(p) for p in objects]


def on_own_group(setup: Setup) -> Setup:
    """Return the setup whose collectives go over the group that the engines of its ranks share."""
    performer = performer_of(setup.axis)
    return setup if performer is None else replace(setup, axis=performer.over(setup.axis))


def _keep_apart(module: nn.RNNBase, lazy: bool) -> None:
    """Let `flatten_parameters` of a recurrent module do nothing while its weights are `lazy`.

    On CUDA it asks for their addresses, to move them into one block. `module.to(device)` calls it,
    and so do forwards that were written for nn.DataParallel.
    """
    if lazy:
        vars(module)["flatten_parameters"] = _leave_as_they_are
    else:
        vars(module).pop("flatten_parameters", None)


def _leave_as_they_are() -> None:
    """Stand in for `RNNBase.flatten_parameters`."""


_CLASS = "_fzero_class"  # of the parameter that a placeholder stands for, if it has one of its own


def in_place_of(old: Tensor, value: Tensor) -> nn.Parameter:
    """Return a parameter with this value: the object `old` itself, if torch can swap it.

    torch cannot swap a tensor that something else of C++ holds. A new parameter is returned then,
    so the caller assigns the result in any case. Hooks, attributes and the gradient of `old` move
    to it; its class, too, which a placeholder keeps for its successor.
    """
    if isinstance(value, LazyParam):
        _keep_from_jit()
    kind = vars(old).pop(_CLASS, nn.Parameter if isinstance(old, LazyParam) else type(old))
    if isinstance(value, LazyParam) or kind is nn.Parameter:
        new = nn.Parameter(value, requires_grad=old.requires_grad)
    else:
        new = Tensor._make_subclass(kind, value, old.requires_grad)
    own = (*LazyParam.__annotations__, "_is_param")
    attributes = {name: x for name, x in vars(old).items() if name not in own}
    if isinstance(value, LazyParam) and kind is not nn.Parameter:
        attributes[_CLASS] = kind
    gradient, hooks = old.grad, (old._backward_hooks, old._post_accumulate_grad_hooks)
    # swap_tensors would swap the dict of a hook, and leave what calls it behind.
    old._backward_hooks = old.grad = None
    old._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    p: Any = old
    try:
        _swap(old, new)
    except RuntimeError:
        p = new
    vars(p).update(attributes)
    p.grad = gradient
    # The same dicts, so that handles of hooks go on working.
    p._backward_hooks, p._post_accumulate_grad_hooks = hooks
    return p


def _swap(a: Any, b: Any) -> None:
    """`torch.utils.swap_tensors`, also of what has weak references: they lead to the objects."""
    if not weakref.getweakrefcount(a):
        torch.utils.swap_tensors(a, b)
        return
    if a._use_count() > 1:
        raise RuntimeError("Something else holds the tensor.")
    for name in ("__class__", "__dict__"):
        mine, theirs = getattr(a, name), getattr(b, name)
        setattr(a, name, theirs)
        setattr(b, name, mine)
    torch._C._swap_tensor_impl(a, b)


@functools.cache
def _keep_from_jit() -> None:
    """Let torch.jit refuse a module, or a part of one, whose parameters are placeholders.

    TorchScript would read their memory, which they have not, and end the process.
    """
    recursive: Any = vars(torch.jit)["_recursive"]
    before = recursive.check_module_initialized

    @functools.wraps(before)
    def check(module: Any) -> None:
        before(module)
        if any(isinstance(p, LazyParam) for p in module.parameters()):
            raise not_for_jit("a module at stage 3, or with encoded parameters")

    recursive.check_module_initialized = check


# module.load_state_dict of an engine's module: one error where it cannot be, before it begins.


def refuse_load(
    module: nn.Module, values: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Raise if `values` are for placeholders, or are to replace parameters.

    A pre-hook of load_state_dict: torch itself would go on after each parameter that refuses, and
    put all their errors into one.
    """
    named = module.named_parameters(remove_duplicate=False)
    wanted = [(prefix + path, p) for path, p in named if prefix + path in values]
    if wanted and metadata.get("assign_to_params_buffers"):
        raise LayoutError(
            f"load_state_dict(assign=True) of {len(wanted)} parameters of an engine's module.",
            cause="a load that puts other tensors in the places of parameters, which the engine "
            "would not train.",
            fix="leave assign out; or load before the Engine is made.",
        )
    lazy = [path for path, p in wanted if isinstance(p, LazyParam) and not _is_writable(p)]
    if lazy:
        raise LayoutError(
            f"load_state_dict of {len(lazy)} parameters of stage 3, the first {lazy[0]}: this rank "
            "has only a shard of each.",
            cause="module.load_state_dict(values) after Engine(..., stage=3).",
            fix="on every rank, `with fzero.adapter.gathered(module, modify=True): "
            "module.load_state_dict(values)`; or load before the Engine is made.",
        )


def _is_writable(p: LazyParam) -> bool:
    """Whether it is in a block of `gathered(modify=True)`, or waits for its engine."""
    reader: Any = p.reader
    return bool(reader.writable[reader.unit_of(p.where[0])])
