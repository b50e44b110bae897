"""Which dim of a layer's weights an axis divides where several could be.

A decision on names of dims alone, so that all arrays of one set of dims agree. Pure;
must not know meshes, costs or programs.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from dtft.planner.experts import Arrays


def arrays_of_weights(
    parameters: Sequence[Sequence[int]], loops: Container[int]
) -> Arrays:
    """Arrays with the dims of a parameter, each with the dim that is divided first.

    That is the dim that the fewest parameters have: a layer's own width, not the one
    that all layers hand on. So where an axis divides both, a layer's two products work
    on the same part of its width, and a gradient, whose dims JAX may give in another
    order than its parameter's, is divided as the parameter is. XLA answers two weights
    that disagree by gathering what is between them, in compiled steps up to 16 GiB.

    Args:
        parameters: dims of each; equal layers' as one.
        loops: dims that a loop goes along: an array inside of it is without them.

    >>> width, hidden, words, layers = 0, 1, 2, 3
    >>> up, down = [layers, width, hidden], [layers, hidden, width]
    >>> found = arrays_of_weights([up, down, [words, width], [layers, width]], {layers})
    >>> found[frozenset({width, hidden})] == hidden
    True
    >>> found[frozenset({width, words})] == words
    True
    """
    often = Counter(dim for dims in parameters for dim in set(dims))

    def first(dims: Iterable[int]) -> int:
        return min(dims, key=often.__getitem__)

    found: dict[frozenset[int], int] = {}
    for dims in parameters:
        inside = [dim for dim in dims if dim not in loops]
        if len(inside) > 1:
            found |= dict.fromkeys(map(frozenset, (dims, inside)), first(inside))
    return found
