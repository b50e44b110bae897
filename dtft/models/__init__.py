"""Models: a config each, which builds a Flax NNX module and knows its loss."""
