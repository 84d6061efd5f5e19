"""Reports: figures of a live state, and the report of a checkpoint by `python -m jaxreplay`.

Inspected arrays are copied to the host. Figures need matplotlib (extra `plots`), text does not.
"""

import os
from typing import Any

import jax
import jax.core

from jaxreplay._common.xla import reads_state
from jaxreplay.checkpoint import _description
from jaxreplay.inspection import _figures, _page, _saved, _sections, _views
from jaxreplay.inspection._saved import Saved

Figures = _figures.Figures


@reads_state
def plot(buffer: Any, state: Any) -> Figures:
    """Figures of a state, shown by a notebook: priorities, ages, cumulative mass, weights, returns and more.

    Figures cover all stored items, in O(N log N). Priorities, counts and the item leaf named `Rn`, `reward`, `rewards`
    or `r` are copied to the host.

    Args:
      buffer: a buffer, `Mixture`, `Sharded` or `DifficultyPools`, or a dict, list or tuple of them.
      state: its state, or a dict, list or tuple of states as for `save`; unchanged.

    Returns:
      matplotlib figures by name: "priorities", "ages", "mass", "weights", "updates", "returns", "episodes", "pools".
      Figures without data are left out. With several states, names start with the path of the state, as in
      "replay/priorities".

    Raises:
      ImportError: matplotlib is not installed (extra `plots`).
      ValueError: values are traced, or a part of `buffer` cannot be described.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(epsilon=0.0))
      >>> items = jnp.array([10, 20, 30, 40])
      >>> # `figures["mass"]` is a matplotlib Figure.
      >>> figures = jr.plot(buffer, buffer.add(buffer.init(items), items))
      >>> sorted(figures)
      ['ages', 'mass', 'priorities', 'weights']
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        raise ValueError("state: is traced; plot runs on the host, so call it outside of jit, scan and vmap.")
    config = _description.describe(_description.with_numbers(buffer, state))
    figures = Figures()
    for view in _views.views(Saved("", {}, config, state)):
        prefix = f"{view.name}/" if view.name else ""
        figures |= {f"{prefix}{name}": picture.figure for name, picture in _figures.pictures(view).items()}
    return figures


def of_checkpoint(path: str | os.PathLike, html: bool) -> str:
    """Report of the checkpoint at `path`, as text or HTML; its configuration is not needed.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: the checkpoint is damaged or has a newer format.
      ImportError: `html` is True and matplotlib is not installed.
    """
    saved = _saved.from_checkpoint(path)
    return _page.page(saved) if html else _sections.text(saved)
