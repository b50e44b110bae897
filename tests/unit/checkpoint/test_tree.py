"""Leaf paths: order, kinds of keys and what is refused."""

from typing import NamedTuple

import pytest

from dtft.checkpoint.state.record import leaf_path, state_path
from dtft.checkpoint.state.tree import from_paths, listed, nested, to_paths


class Moments(NamedTuple):
    mu: object
    nu: object


TREE = {"opt": (Moments(1, {"w": 2}), None), "params": {"layers": [3, 4]}}


def test_paths_join_dict_keys_attributes_and_indices() -> None:
    assert to_paths(TREE) == {
        "opt/0/mu": 1,
        "opt/0/nu/w": 2,
        "params/layers/0": 3,
        "params/layers/1": 4,
    }


def test_round_trip_does_not_depend_on_the_mapping_order() -> None:
    mapping = dict(reversed(to_paths(TREE).items()))
    assert from_paths(TREE, mapping) == TREE


def test_a_slash_in_a_key_is_escaped_as_haiku_has_it_in_names() -> None:
    tree = {"mlp/~/linear_0": {"w": 1}, "mlp": {"~": {"linear_0": {"w": 2}}}}
    paths = to_paths(tree)
    assert paths == {"mlp/~/linear_0/w": 2, "mlp%2F~%2Flinear_0/w": 1}
    assert from_paths(tree, paths) == tree
    assert nested(paths)["mlp%2F~%2Flinear_0"] == {"w": 1}
    assert [state_path(leaf_path(path)) for path in paths] == [*paths]


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ValueError, match="Give it a name"):
        to_paths({"a": {"": 1}})
    with pytest.raises(ValueError, match="Rename one"):
        to_paths({"a/b": 1, "a%2Fb": 2})


def test_two_leaves_with_one_path_are_refused() -> None:
    class Ambiguous:
        pass

    import jax

    jax.tree_util.register_pytree_with_keys(
        Ambiguous,
        lambda _: (
            ((jax.tree_util.DictKey(1), 1), (jax.tree_util.DictKey("1"), 2)),
            None,
        ),
        lambda _, __: Ambiguous(),
    )
    with pytest.raises(ValueError, match="two leaves at path '1'"):
        to_paths(Ambiguous())


def test_error_lists_missing_and_unexpected() -> None:
    with pytest.raises(ValueError, match=r"not found: a\. Found but not expected: c"):
        from_paths({"a": 0, "b": 0}, {"b": 0, "c": 0})


def test_listed_counts_what_it_does_not_show() -> None:
    assert listed([str(i) for i in range(10)]).endswith("7 and 2 more")
