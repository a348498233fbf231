"""What is ordered before what on "sim": vector clocks over streams, events, works and the host.

`with checked() as order:` notes each operation of the block, the bytes that it reads and writes,
and its stream. `order.reports` has, with both places, what only luck would have got right:

    unordered     two accesses of the same bytes, one of them a write, without an order
    host          the same, where one of them is the host's, of pinned memory
    freed         memory freed while a stream still uses it, and given to another: the stream it was
                  allocated on did not wait before it allocated again; no `record_stream` either
    pageable      a non_blocking copy from or to memory that is not pinned, or through such
    overwritten   pinned memory that was not what it had been when its copy was over

`order.waits` counts where the host waited for the device, by what and where.

The clock of a stream says how far each other stream has come before whatever it does next; the
host is one more stream, ordered before all that it enqueues later. What cannot be seen, as a file
that is written from pinned memory, is made to be seen: until the host has waited, 0xff are there.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.device.sim import load

HERE = Path(__file__).parent
QUIET = (
    str(Path(torch.__file__).parent),
    *(str(HERE / f"{n}.py") for n in ("order", "sim", "backend")),
)
HOST = (-1, -1)

Stream = tuple[int, int]  # (index of the device, id)
Clock = dict[Stream, int]
Place = tuple[tuple[str, int, str], ...]  # (file, line, function), the innermost first


class Access(NamedTuple):
    """Bytes [lo, hi) of a block: every `sizes`, `strides` of elements of `item` bytes."""

    lo: int
    hi: int
    item: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    write: bool
    stream: Stream
    time: int
    op: str
    place: Place

    @property
    def dense(self) -> bool:
        """Whether it has all of its bytes."""
        count = self.item
        for size in self.sizes:
            count *= size
        return count == self.hi - self.lo

    def meets(self, other: Access) -> bool:
        """Whether both have a byte in common."""
        if self.hi <= other.lo or other.hi <= self.lo:
            return False
        return (self.dense and other.dense) or not self.bytes().isdisjoint(other.bytes())

    def bytes(self) -> set[int]:
        """The number of each byte."""
        found = {*range(self.lo, self.lo + self.item)}
        for size, stride in zip(self.sizes, self.strides, strict=True):
            found = {b + i * stride * self.item for b in found for i in range(size)}
        return found


class Block:
    """Memory that is alive: where it came from, and the accesses that are not yet outdated."""

    def __init__(self, stream: Stream = (0, 0), pinned: bool = False) -> None:
        self.stream, self.pinned = stream, pinned
        self.accesses: list[Access] = []
        self.recorded: set[Stream] = set()  # by record_stream
        self.names: list[tuple[int, int, str]] = []


class Copy(NamedTuple):
    """A copy of or to pinned memory that the host has not waited for."""

    access: Access  # of the host's memory, by the stream
    block: int
    address: int
    data: bytes
    to_host: bool
    host: int  # how far the host was when it enqueued the copy


class Report(NamedTuple):
    """A fault: of which kind, of what, and the two places."""

    kind: str
    what: str
    op: str
    place: str
    other_op: str = ""
    other_place: str = ""

    def __str__(self) -> str:
        text = f"{self.kind}: {self.what}\n  {self.op} at {self.place}"
        return text + f"\n  {self.other_op} at {self.other_place}" * bool(self.other_op)


class OrderError(AssertionError):
    """A program relies on an order that nothing makes."""


class Order:
    """What was noted; the extension tells of each thing by the name of a method."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.waits: Counter[tuple[str, str]] = Counter()
        self._clocks: dict[Stream, Clock] = {HOST: {HOST: 1}}
        self._events: dict[int, Clock] = {}
        self._blocks: dict[int, Block] = {}
        self._freed: dict[Stream, list[tuple[Block, Access, Place]]] = {}  # while in use elsewhere
        self.copies: list[Copy] = []
        self.backward: Place = ()  # where it was called last
        self._lock = threading.RLock()

    def __call__(self, what: str, *args: Any) -> None:
        """Note one thing after the other, whichever threads tell of them."""
        with self._lock:
            getattr(self, what)(*args)

    def name(self, module: nn.Module) -> None:
        """Have reports name the parameters of a module."""
        for path, x in itertools.chain(module.named_parameters(), module.named_buffers()):
            first = int(x.storage_offset()) * x.element_size()
            block = self._block(load().block(x))
            block.names.append((first, first + x.numel() * x.element_size(), path))

    def require_none(self) -> None:
        """Raise if there is a report."""
        if self.reports:
            raise OrderError("\n".join(map(str, self.reports)))

    # Operations

    def ran(self, op: str, stream: Stream, accesses: Sequence[Any]) -> None:
        """An operation was enqueued, or the host read or wrote pinned memory."""
        clock, place = self._clocks.setdefault(stream, {}), self._place()
        _merge(clock, self._clocks[HOST])
        clock[stream] = clock.get(stream, 0) + 1
        for block, lo, item, sizes, strides, write in accesses:
            last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
            hi = lo + (last + 1) * item
            found = Access(lo, hi, item, sizes, strides, write, stream, clock[stream], op, place)
            self._note(block, found, clock)

    def _block(self, number: int) -> Block:
        return self._blocks.setdefault(number, Block())  # older than this watch

    def _note(self, number: int, access: Access, clock: Clock) -> None:
        block, kept = self._block(number), []
        for old in block.accesses:
            before = old.time <= clock.get(old.stream, 0)
            if not before and (old.write or access.write) and old.meets(access):
                host = HOST in (old.stream, access.stream)
                self._report("host" if host else "unordered", block, access, old)
            # Who comes after this access comes after the old one, too.
            covers = access.lo <= old.lo and old.hi <= access.hi and access.dense
            if not (before and covers and (access.write or not old.write)):
                kept.append(old)
        block.accesses = [*kept, access]

    def _report(
        self, kind: str, block: Block, access: Access, old: Access | None, what: str = ""
    ) -> None:
        first, last = access.lo, access.hi
        if old:
            first, last = max(first, old.lo), min(last, old.hi)
        names = [name for lo, hi, name in block.names if lo < last and first < hi]
        of = f"bytes {first} to {last} of {', '.join(names) or 'a block'}"
        ends = (
            []
            if old is None
            else [f"{old.op} ({_verb(old)} on {_called(old.stream)})", _told(old.place)]
        )
        verb = f"{access.op} ({_verb(access)} on {_called(access.stream)})"
        self._add(Report(kind, f"{of}{what}", verb, _told(access.place), *ends))

    def _add(self, found: Report) -> None:
        if found not in self.reports:
            self.reports.append(found)

    # Memory

    def allocated(self, block: int, index: int, stream: Stream, address: int, size: int) -> None:
        """A block of a device, or (index -1) of pinned memory, is made."""
        self._blocks[block] = Block(stream, index < 0)
        if index < 0 or stream not in self._freed:
            return
        clock = self._with_host(stream)
        for old, access, freed in self._freed.pop(stream):
            if access.time > clock.get(access.stream, 0):
                of = f", allocated on {_called(stream)}, freed at {_told(freed)}"
                what = f"{of}, which may be given away again at {_told(self._place())}"
                self._report("freed", old, access, None, what)

    def freed(self, number: int) -> None:
        """A block is freed: the next allocation on its stream may be given the same memory."""
        # Of pinned memory the allocator waits for the copies.
        self._settle([copy for copy in self.copies if copy.block == number])
        block = self._blocks.pop(number, None)
        if block is None or block.pinned:
            return
        clock, here = self._with_host(block.stream), self._place()
        self._freed.setdefault(block.stream, []).extend(
            (block, access, here)
            for access in block.accesses
            if access.stream not in (block.stream, HOST, *block.recorded)
            and access.time > clock.get(access.stream, 0)
        )

    def stream_recorded(self, block: int, stream: Stream) -> None:
        """`record_stream`."""
        self._block(block).recorded.add(stream)

    # Order

    def _with_host(self, stream: Stream) -> Clock:
        clock = dict(self._clocks.get(stream, {}))
        _merge(clock, self._clocks[HOST])
        return clock

    def event_recorded(self, event: int, stream: Stream) -> None:
        """An event is where the stream is now."""
        self._events[event] = self._with_host(stream)

    def event_awaited(self, event: int, stream: Stream) -> None:
        """A stream waits for an event; one that was never recorded is over."""
        _merge(self._clocks.setdefault(stream, {}), self._events.get(event, {}))

    def event_synchronized(self, event: int, asked: bool) -> None:
        """The host waits for an event, or asked and was told that it is over."""
        self._host_knows(self._events.get(event, {}), "" if asked else "Event.synchronize")

    def stream_synchronized(self, stream: Stream, asked: bool) -> None:
        """The host waits for a stream, or asked and was told that it is at its end."""
        self._host_knows(self._clocks.get(stream, {}), "" if asked else "Stream.synchronize")

    def device_synchronized(self, index: int) -> None:
        """The host waits for all streams of a device."""
        everything: Clock = {}
        for stream, clock in self._clocks.items():
            if stream[0] == index:
                _merge(everything, clock)
        self._host_knows(everything, "synchronize")

    def host_waited(self, what: str, stream: Stream) -> None:
        """The host waits for a stream, as it needs a result."""
        self._host_knows(self._clocks.get(stream, {}), what)

    def _host_knows(self, clock: Clock, waited: str) -> None:
        if waited:
            self.waits[waited, _told(self._place())] += 1
        host = self._clocks[HOST]
        _merge(host, clock)
        over = [c for c in self.copies if c.access.time <= host.get(c.access.stream, 0)]
        self._settle(over)

    # Copies between the device and pinned memory

    def copied(
        self, to_host: bool, direct: bool, stream: Stream, address: int, used: Sequence[Any]
    ) -> None:
        """A non_blocking copy was enqueued."""
        if not direct:
            where = "to" if to_host else "from"
            what = f"a non_blocking copy {where} the host whose memory there is not pinned"
            self._add(Report("pageable", what, "aten::copy_", _told(self._place())))
            return
        number = used[0][0]
        self._block(number).pinned = True  # also of one that is older than this watch
        access = self._block(number).accesses[-1]
        if not access.dense:
            return
        data = ctypes.string_at(address, access.hi - access.lo)
        host = self._clocks[HOST][HOST]
        self.copies.append(Copy(access, number, address, data, to_host, host))
        if to_host:
            ctypes.memset(address, 0xFF, len(data))

    def used_by_copy(self, block: int, written: bool) -> None:
        """A copy is about to use a pinned block: have what was copied there be there.

        What was copied from there may be overwritten by the device, in its order.
        """
        of = [copy for copy in self.copies if copy.block == block]
        self._settle([copy for copy in of if copy.to_host or written])

    def _settle(self, over: Sequence[Copy]) -> None:
        for copy in over:
            self.copies.remove(copy)
            if copy.to_host:
                ctypes.memmove(copy.address, copy.data, len(copy.data))
            else:
                now = ctypes.string_at(copy.address, len(copy.data))
                block = self._blocks.get(copy.block, Block())
                seen = any(
                    a.write and a.stream == HOST and a.time > copy.host for a in block.accesses
                )
                if now != copy.data and not seen:  # by what cannot be seen
                    over_at = _told(self._place())
                    what = f" are others than those copied; the copy was over at {over_at}"
                    self._report("overwritten", block, copy.access, None, what)

    def close(self) -> None:
        """Wait for the rest."""
        self._settle([*self.copies])

    def _place(self) -> Place:
        """The innermost lines of the program; of the call of backward, for a node of it."""
        return _lines() or self.backward


class _Host(TorchDispatchMode):
    """Tells of what the host does with pinned memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):  # nothing is computed
            return func(*args, **kwargs)
        if any(kind is not Tensor and not issubclass(kind, nn.Parameter) for kind in types):
            return NotImplemented
        devices = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.device)]
        if any(device.type != "cpu" for device in devices):
            return func(*args, **kwargs)  # the extension tells of it
        read, write = [], []
        by_name = {argument.name: argument for argument in func._schema.arguments}
        given = [*zip(func._schema.arguments, args), *((by_name[k], v) for k, v in kwargs.items())]  # noqa: B905
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for x in tree_leaves(value):
                if isinstance(x, Tensor):
                    if x.device.type != "cpu":
                        return func(*args, **kwargs)
                    (write if written else read).append(x)
        name = func._schema.name.removeprefix("aten::")
        touches = not name.startswith(
            ("new_", "set_", "resize_", "is_pinned")
        ) and not name.endswith("_like")
        returns = func._schema.returns
        is_view = bool(returns and returns[0].alias_info and not returns[0].alias_info.is_write)
        if (read or write) and not is_view and touches:
            load().host_ran(func._schema.name, read, write)
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Tells of what reads the host's memory without an operator, and of calls of backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("backward", "grad"):
            _watching[0].backward = _lines()
        if name in ("numpy", "tolist", "__array__") and isinstance(args[0], Tensor):
            load().host_ran(name, [args[0]], [])
        return func(*args, **(kwargs or {}))


_watching: list[Order] = []


@contextmanager
def checked(*modules: nn.Module) -> Iterator[Order]:
    """Note the order of all that runs on "sim" in the block; name parameters of the modules.

    In a block of another the order is the same.
    """
    order = _watching[0] if _watching else Order()
    for module in modules:
        order.name(module)
    if _watching:
        yield order
        return
    run = threading.Thread.run

    def watched(thread: threading.Thread) -> None:
        if thread.daemon:  # it may outlive the block
            return run(thread)
        with _Calls(), _Host():  # modes are of a thread
            run(thread)

    load().watch(order)
    _watching.append(order)
    threading.Thread.run = watched
    try:
        with _Calls(), _Host():
            yield order
    finally:
        threading.Thread.run = run
        _watching.clear()
        load().watch(None)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


def _lines() -> Place:
    frame: Any = sys._getframe(1)
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < 4:
        code = frame.f_code
        if not code.co_filename.startswith((*QUIET, "<")) and "/lib/python" not in code.co_filename:
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


def _told(place: Place) -> str:
    root = f"{HERE.parent.parent}/"
    lines = (f"{file.removeprefix(root)}:{line} in {of}" for file, line, of in place)
    return " < ".join(lines) or "no known line"


def _called(stream: Stream) -> str:
    return "the host" if stream == HOST else f"stream {stream[1]} of sim:{stream[0]}"


def _verb(access: Access) -> str:
    return "writes" if access.write else "reads"
