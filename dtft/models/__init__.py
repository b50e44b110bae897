"""Model configs: each builds a Flax NNX module and computes its loss."""
