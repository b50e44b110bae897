"""Whatever a message may carry as a value, whether or not it makes sense there."""

from hypothesis import strategies as st

from dtft.elastic.messages.reports import REPORT_FIELDS

SMALL = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=20),
    st.sampled_from([*REPORT_FIELDS, "a", '{"mesh": {}}', '{"mesh": {"slots": [9]}}']),
)
ANYTHING = st.recursive(
    SMALL,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(0, 9)), inner),
    ),
    max_leaves=6,
)
