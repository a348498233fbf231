"""Several optimizers for the leaves of one state, as optax.partition has it."""

from __future__ import annotations

from collections.abc import Mapping

from fzero.errors import LayoutError
from fzero.optim._partition import Label, Partition, Rule


def partition(rules: Mapping[str, Rule], label: Label) -> Partition:
    """Each leaf by the rule that its label names: p' = rules[label(leaf)](p, g).

    Muon for the matrices of a model, and AdamW for its embeddings, its head and its vectors, are
    one optimizer then: one state, one update, one checkpoint.

    Args:
        rules: name -> a rule of `fzero.optim`, or `fzero.optim.from_torch(...)` of a class or a
            factory.
        label: leaf -> name of its rule; `leaf` has path, shape and dtype. It is asked for leaves
            that learn, and must be the same on every rank.

    Returns:
        The optimizer, for `fzero.init`, `step.init` and `Engine`.

    Raises:
        LayoutError: for rules of another kind; when a state is made, for a label without a rule.

    Source: optax, `optax.partition`.

    Example:
        >>> import torch, fzero
        >>> rules = {"matrices": fzero.optim.muon(0.02), "rest": fzero.optim.adamw(3e-4)}
        >>> optimizer = partition(rules, lambda x: "matrices" if len(x.shape) == 2 else "rest")
        >>> params = {"w": torch.ones(2, 3), "b": torch.ones(3)}
        >>> state = fzero.init(params, optimizer, stage=0)
        >>> state, _ = fzero.grad_and_reduce(lambda p: (p["w"] + p["b"]).sum(), state)()
        >>> sorted(fzero.full_params(fzero.apply_gradients(state)))
        ['b', 'w']
    """
    good = isinstance(rules, Mapping) and all(isinstance(x, Rule) for x in rules.values())
    if not good or not rules or not callable(label):
        raise LayoutError(
            f"partition: rules={rules!r:.200}, label={label!r:.80}.",
            cause="something else than {name: optimizer} and leaf -> name: a class of torch.optim "
            "itself, or an (init, update) pair.",
            fix="write fzero.optim.partition({'a': fzero.optim.muon(lr), 'b': fzero.optim."
            "from_torch(torch.optim.AdamW)}, lambda leaf: 'a' if len(leaf.shape) == 2 else 'b').",
        )
    return Partition(rules=tuple((str(name), rule) for name, rule in rules.items()), label=label)
