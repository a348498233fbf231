"""Programs of plain PyTorch for "sim": sound ones, and ones with a planted fault of order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.device.order import Order

# 2.13 renamed both.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SOUND: dict[str, Callable[[Order], None]] = {}
FAULTS: dict[str, tuple[str, Callable[[Order], None]]] = {}


def sound(program: Callable[[Order], None]) -> Callable[[Order], None]:
    """Note a program that must have no report."""
    SOUND[program.__name__] = program
    return program


def fault(kind: str) -> Callable[[Callable[[Order], None]], Callable[[Order], None]]:
    """Note a program whose only reports must be of a kind."""

    def noted(program: Callable[[Order], None]) -> Callable[[Order], None]:
        FAULTS[program.__name__] = (kind, program)
        return program

    return noted


def ones(*shape: int, on: str = "sim") -> Tensor:
    return torch.ones(shape, device=on)


def pinned(*shape: int) -> Tensor:
    return torch.ones(shape).pin_memory()


def main() -> torch.Stream:
    return torch.sim.current_stream()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to("sim")


# ---- Sound ---------------------------------------------------------------------------------------


@sound
def a_side_stream_that_waits_and_is_waited_for(order: Order) -> None:
    side, x = torch.Stream("sim"), ones(4)
    side.wait_stream(main())
    with side:
        y = x * 2
    main().wait_stream(side)
    y.record_stream(main())
    x.record_stream(side)
    (x + y).add_(1)


@sound
def events_for_streams_and_memory_kept_until_the_end(order: Order) -> None:
    side, done, x = torch.Stream("sim"), torch.Event("sim"), ones(4)
    ready = main().record_event()
    side.wait_event(ready)
    with side:
        kept = x.mul(2)
        done.record()
    other = ones(4) * 3  # at the same time
    del x  # whoever is given its memory comes after `done`, and other streams are not given it
    with torch.Stream("sim"):
        ones(4)
    main().wait_event(done)
    other += kept
    side.wait_stream(main())
    del kept


@sound
def a_prefetch_from_pinned_memory(order: Order) -> None:
    copies, buffer = torch.Stream("sim"), pinned(16)
    for step in range(3):
        with copies:
            batch = buffer.to("sim", non_blocking=True)
        over = copies.record_event()
        main().wait_event(over)
        batch.record_stream(main())
        batch.mul(2)
        over.synchronize()
        buffer.fill_(step)


@sound
def two_pinned_buffers_in_turn(order: Order) -> None:
    buffers = [(pinned(16), torch.Event("sim")) for _ in range(2)]
    target = ones(16)
    for step in range(6):
        buffer, over = buffers[step % 2]
        over.synchronize()
        buffer.fill_(step)
        target.copy_(buffer, non_blocking=True)
        over.record()
        target.add_(1)


@sound
def a_copy_to_the_host_that_is_awaited(order: Order) -> None:
    x, into = ones(8) * 3, pinned(8)
    into.copy_(x, non_blocking=True)
    main().synchronize()
    assert into.tolist() == [3.0] * 8
    into.copy_(x, non_blocking=True)
    assert x.sum().item() == 24.0  # who has a result waited for all before it
    assert into.numpy().sum() == 24


@sound
def offload_and_back_without_the_host(order: Order) -> None:
    x, into = ones(8) * 3, pinned(8)
    into.copy_(x, non_blocking=True)
    back = into.to("sim", non_blocking=True)
    assert back.sum().item() == 24.0


@sound
def asking_until_it_is_over(order: Order) -> None:
    into = pinned(8)
    into.copy_(ones(8), non_blocking=True)
    over = main().record_event()
    while not over.query():
        pass
    into.add_(1)


@sound
def two_halves_on_two_streams(order: Order) -> None:
    x, side = ones(6, 6), torch.Stream("sim")
    side.wait_stream(main())
    x[:3].add_(1)
    with side:
        x[3:].add_(1)
    main().wait_stream(side)
    side.wait_stream(main())
    x[:, ::2].mul_(2)
    with side:
        x[:, 1::2].mul_(3)
    main().wait_stream(side)
    assert x.sum().item() == 180.0


@sound
def two_readers(order: Order) -> None:
    x, side = ones(6), torch.Stream("sim")
    side.wait_stream(main())
    with side:
        a = x * 2
    b = x * 3
    main().wait_stream(side)
    x.add_(a.add(b))
    a.record_stream(main())


@sound
def a_forward_on_a_side_stream(order: Order) -> None:
    net, side, x = model(), torch.Stream("sim"), ones(3, 8)
    side.wait_stream(main())
    with side:
        hidden = net[0](x)
    main().wait_stream(side)
    hidden.record_stream(main())
    x.record_stream(side)
    net[2](hidden).sum().backward()
    torch.sim.synchronize()
    for p in net.parameters():
        p.grad.mul_(0.1)  # allocated on the side stream
    net.zero_grad()
    side.wait_stream(main())
    with side:
        ones(4)


@sound
def two_devices(order: Order) -> None:
    x = ones(8)
    y = (x * 2).to("sim:1")
    with torch.sim.device(1):
        z = y + 1
    back = z.to("sim:0")
    back.add_(x)
    assert back.sum().item() == 32.0


@sound
def gradients_reduced_in_hooks(order: Order) -> None:
    net, works = model(), list[Any]()
    order.name(net)

    def start(p: Tensor) -> None:
        works.append(dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, async_op=True))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(start)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(ones(4, 8)).sum().backward()
        for work in works:
            work.wait()
        works.clear()
        optimizer.step()
        optimizer.zero_grad()


@sound
def shards_gathered_ahead(order: Order) -> None:
    ranks = dist.get_world_size()
    shards, side = [ones(4) * i for i in range(4)], torch.Stream("sim")
    total = ones(4 * ranks)

    def start(i: int) -> tuple[Tensor, torch.Event]:
        with side:
            full = torch.empty(4 * ranks, device="sim")
            gather(full, shards[i])
            return full, side.record_event()

    side.wait_stream(main())
    ahead = start(0)
    for i in range(4):
        full, ready = ahead
        if i + 1 < 4:
            ahead = start(i + 1)
        main().wait_event(ready)
        total.add_(full)
        full.record_stream(main())
    side.wait_stream(main())
    assert total[0].item() == 7.0


@sound
def every_collective(order: Order) -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    rows = [torch.arange(4.0 * n) + 10 * rank for rank in range(n)]  # what each rank has
    total, own = torch.stack(rows).sum(0), slice(4 * me, 4 * me + 4)
    x = rows[me].sim()

    def is_(found: Tensor, wanted: Tensor) -> None:
        assert torch.equal(found.cpu(), wanted)

    shard, swapped, full = ones(4), torch.empty_like(x), ones(4 * n)
    scatter(shard, x)
    is_(shard, total[own])
    dist.all_to_all_single(swapped, x)
    is_(swapped, torch.cat([row[own] for row in rows]))
    counts = [2, *[2] * (n - 1)]
    uneven = ones(sum(counts))
    dist.all_to_all_single(uneven, x[: 2 * n].clone(), counts, counts)
    is_(uneven, torch.cat([row[2 * me : 2 * me + 2] for row in rows]))
    full[own] = me + 1.0
    gather(full, full[own])  # right where it is
    is_(full, torch.arange(1.0, n + 1).repeat_interleave(4))
    parts = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(parts, x)
    is_(torch.stack(parts), torch.stack(rows))
    for op, wanted in (("SUM", total), ("AVG", total / n), ("MAX", rows[-1]), ("MIN", rows[0])):
        y = x.clone()
        dist.all_reduce(y, op=getattr(dist.ReduceOp, op))
        is_(y, wanted)
    y = x.clone()
    dist.reduce(y, 0)
    is_(y, total if me == 0 else rows[me])
    dist.broadcast(y, 0)
    is_(y, total)
    dist.scatter(shard, [*x.chunk(n)] if me == 0 else None, src=0)
    is_(shard, rows[0][own])
    into = [torch.empty_like(x) for _ in range(n)] if me == 0 else None
    dist.gather(x, into, dst=0)
    is_(torch.stack(into or parts), torch.stack(rows))
    if n > 1:
        pair = [dist.P2POp(dist.isend, x, (me + 1) % n), dist.P2POp(dist.irecv, y, (me - 1) % n)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        is_(y, rows[me - 1])
    outs = [ones(4), ones(4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            scatter(out, x)
    for work in manager.works:
        work.wait()
    is_(outs[1], total[own])
    dist.barrier()


@sound
def torchs_fully_sharded_data_parallel(order: Order) -> None:
    net = nn.Sequential(nn.Sequential(*model(), nn.Linear(4, 8, device="sim")), model())
    for part in (*net, net):
        fully_shard(part, mesh=init_device_mesh("sim", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(3):
        net(ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- Faults --------------------------------------------------------------------------------------


@fault("unordered")
def a_read_that_does_not_wait(order: Order) -> None:
    x, side = ones(4), torch.Stream("sim")
    with side:
        y = x * 2
    x.record_stream(side)
    main().wait_stream(side)
    y.record_stream(main())


@fault("unordered")
def two_writes(order: Order) -> None:
    x, side = ones(4), torch.Stream("sim")
    side.wait_stream(main())
    with side:
        x[::2].fill_(2)
    x[1:3].fill_(3)
    torch.sim.synchronize()


@fault("unordered")
def a_write_under_a_reader(order: Order) -> None:
    x, side = ones(4), torch.Stream("sim")
    side.wait_stream(main())
    with side:
        y = x + 1
    x.zero_()
    torch.sim.synchronize()
    del y


@fault("unordered")
def an_event_that_is_recorded_too_early(order: Order) -> None:
    x, side = ones(4), torch.Stream("sim")
    ready = main().record_event()
    x.mul_(2)
    side.wait_event(ready)
    with side:
        x.add(1)
    torch.sim.synchronize()


@fault("unordered")
def an_event_that_is_awaited_before_it_is_recorded(order: Order) -> None:
    x, side, done = ones(4), torch.Stream("sim"), torch.Event("sim")
    side.wait_stream(main())
    main().wait_event(done)
    with side:
        x.mul_(2)
        done.record()
    x.add(1)
    torch.sim.synchronize()


@fault("unordered")
def another_stream_waits(order: Order) -> None:
    x, side, other = ones(4), torch.Stream("sim"), torch.Stream("sim")
    side.wait_stream(main())
    with side:
        x.mul_(2)
    other.wait_stream(side)
    x.add(1)
    torch.sim.synchronize()


@fault("unordered")
def a_prefetch_that_is_used_at_once(order: Order) -> None:
    copies, buffer = torch.Stream("sim"), pinned(16)
    with copies:
        batch = buffer.to("sim", non_blocking=True)
    batch.record_stream(main())
    batch.mul(2)
    torch.sim.synchronize()


@fault("unordered")
def a_sum_over_ranks_that_nobody_waits_for(order: Order) -> None:
    x = ones(8)
    work = dist.all_reduce(x, async_op=True)
    x.add(1)
    work.wait()


@fault("unordered")
def a_collective_of_what_is_still_being_made(order: Order) -> None:
    x, side = ones(8), torch.Stream("sim")
    side.wait_stream(main())
    with side:
        x.mul_(2)
    dist.all_reduce(x)
    torch.sim.synchronize()


@fault("unordered")
def a_step_under_a_gather(order: Order) -> None:
    net = model()
    order.name(net)
    weight: Any = net[0].weight
    side = torch.Stream("sim")
    net(ones(4, 8)).sum().backward()
    side.wait_stream(main())
    with side:
        full = torch.empty(64 * dist.get_world_size(), device="sim")
        gather(full, weight.detach().view(-1))
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    torch.sim.synchronize()


@fault("unordered")
def gradients_read_on_another_stream(order: Order) -> None:
    net, side = model(), torch.Stream("sim")
    net(ones(4, 8)).sum().backward()
    with side:
        norms = [p.grad.norm() for p in net.parameters()]
    torch.sim.synchronize()
    del norms


@fault("freed")
def memory_of_the_side_stream_freed_under_the_main(order: Order) -> None:
    side = torch.Stream("sim")
    with side:
        y = torch.ones(4, device="sim")
    main().wait_stream(side)
    y.add(1)
    del y
    with side:
        torch.zeros(4, device="sim")


@fault("freed")
def memory_resized_under_a_reader(order: Order) -> None:
    x, side = ones(4), torch.Stream("sim")
    side.wait_stream(main())
    with side:
        y = x * 2
    x.untyped_storage().resize_(0)
    ones(4)
    torch.sim.synchronize()
    del y


@fault("pageable")
def a_copy_from_memory_that_is_not_pinned(order: Order) -> None:
    torch.ones(4).to("sim", non_blocking=True)


@fault("pageable")
def a_copy_to_memory_that_is_not_pinned(order: Order) -> None:
    torch.empty(4).copy_(ones(4), non_blocking=True)  # `to("cpu")` would pin


@fault("pageable")
def a_copy_of_another_dtype(order: Order) -> None:
    pinned(4).to("sim", torch.float64, non_blocking=True)


@fault("host")
def pinned_memory_written_under_a_copy(order: Order) -> None:
    buffer, x = pinned(4), ones(4)
    x.copy_(buffer, non_blocking=True)
    buffer.fill_(2)
    torch.sim.synchronize()


@fault("host")
def pinned_memory_read_too_early(order: Order) -> None:
    into, before = pinned(4), main().record_event()
    into.copy_(ones(4), non_blocking=True)
    before.synchronize()
    into.sum()
    torch.sim.synchronize()


@fault("host")
def pinned_memory_given_to_numpy_too_early(order: Order) -> None:
    into = pinned(4)
    into.copy_(ones(4), non_blocking=True)
    assert into.numpy().sum() != 4
    torch.sim.synchronize()
    assert into.numpy().sum() == 4


@fault("overwritten")
def pinned_memory_written_by_numpy_under_a_copy(order: Order) -> None:
    buffer, x = pinned(4), ones(4)
    array = buffer.numpy()
    x.copy_(buffer, non_blocking=True)
    array[:] = 2
    torch.sim.synchronize()


@fault("host")
def the_wrong_one_of_two_buffers(order: Order) -> None:
    buffers = [(pinned(16), torch.Event("sim")) for _ in range(2)]
    target: Any = ones(16)
    for step in range(4):
        buffer, over = buffers[step % 2][0], buffers[step % 2 - 1][1]
        over.synchronize() if step < 2 else None
        buffer.fill_(step)
        target.copy_(buffer, non_blocking=True)
        over.record()
    torch.sim.synchronize()


@fault("pageable")
def torchs_own_data_parallel(order: Order) -> None:
    """It copies its map of used parameters without pinning it, but on CUDA."""
    net = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
