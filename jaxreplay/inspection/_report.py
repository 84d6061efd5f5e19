"""Reports: figures of a live state, and what `python -m jaxreplay` shows of a saved one.

What is looked at is copied to the host. Figures need matplotlib (extra `plots`), text does not.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.core
import numpy as np

from jaxreplay._common.xla import reads_state
from jaxreplay.buffers import Mixture
from jaxreplay.buffers._shards import whole_of, with_whole
from jaxreplay.checkpoint import _description
from jaxreplay.inspection import _figures, _page, _saved, _text, _views
from jaxreplay.inspection._saved import Saved

Figures = _figures.Figures


@reads_state
def plot(buffer: Any, state: Any) -> Figures:
    """Figures of a state, which a notebook shows: priorities, ages, cumulative mass, weights, returns, and the like.

    Each figure shows something of all that is stored. Costs O(N log N). The priorities, the counts and the leaf of an
    item that is named `Rn`, `reward`, `rewards` or `r` are copied to the host.

    Args:
      buffer: a buffer, `Mixture`, `Sharded` or `DifficultyPools`, or a dict, list or tuple of them.
      state: its state, or the like of states, as for `save`; unchanged.

    Returns:
      figures of matplotlib by name: "priorities", "ages", "mass", "weights", "updates", "returns", "episodes", "pools",
      as far as there is something to show. Of several states the names begin with where they are, as in
      "replay/priorities".

    Raises:
      ImportError: matplotlib is not installed; the extra `plots` brings it.
      ValueError: values are traced, or a part of `buffer` cannot be described.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(epsilon=0.0))
      >>> items = jnp.array([10, 20, 30, 40])
      >>> figures = jr.plot(buffer, buffer.add(buffer.init(items), items))  # figures["mass"] is one of matplotlib
      >>> sorted(figures)
      ['ages', 'mass', 'priorities', 'weights']
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        raise ValueError("state: is traced; plot runs on the host, so call it outside of jit, scan and vmap.")
    config = _description.describe(_with_numbers(buffer, state))
    found = _views.views(Saved("", {}, config, _saved.from_state(state)))
    figures = Figures()
    for view in found:
        prefix = f"{view.name}/" if view.name else ""
        figures |= {f"{prefix}{name}": picture.figure for name, picture in _figures.pictures(view).items()}
    return figures


def of_checkpoint(path: str | os.PathLike, html: bool) -> str:
    """A report of the checkpoint at `path`, as text or as a page; its configuration need not be known.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: it is damaged, or has a newer format.
      ImportError: matplotlib is not installed, and a page is asked for.
    """
    saved = _saved.from_checkpoint(path)
    views, others = _views.views(saved), _views.others(saved)
    if not html:
        return _text.text(saved, views, others)
    return _page.page(saved, [(view, _figures.pictures(view)) for view in views], others)


def _with_numbers(buffer: Any, state: Any) -> Any:
    """The configuration with the present number in place of a schedule of beta."""
    if isinstance(buffer, dict):
        return {key: _with_numbers(x, state[key]) if key in state else x for key, x in buffer.items()}
    if isinstance(buffer, list | tuple) and not hasattr(buffer, "_fields") and isinstance(state, list | tuple):
        return [_with_numbers(x, y) for x, y in zip(buffer, state, strict=False)]
    if isinstance(buffer, Mixture):
        return dataclasses.replace(buffer, buffers=_with_numbers(buffer.buffers, state))
    whole = whole_of(buffer)
    sampler = getattr(whole, "sampler", None)
    if not callable(getattr(sampler, "beta", None)) or not hasattr(state, "sampler"):
        return buffer
    beta = float(np.max(np.asarray(sampler.beta(state.sampler.updates))))  # pyright: ignore
    return with_whole(buffer, dataclasses.replace(whole, sampler=dataclasses.replace(sampler, beta=beta)))  # pyright: ignore
