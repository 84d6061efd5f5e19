"""Closed: the error of calls on a `Shared` that is closed."""


class Closed(RuntimeError):
    """The `jaxreplay.Shared` is closed; if an error closed it, that error is the cause (`__cause__`).

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30])
      >>> shared = jr.Shared(buffer, buffer.init(items))
      >>> shared.close(ValueError("no more episodes"))
      >>> try:
      ...     shared.add(items)
      ... except jr.Closed as error:
      ...     print(repr(error.__cause__))
      ValueError('no more episodes')
    """
