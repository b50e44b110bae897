"""Experiments, data, the step and the loop. Decides no membership and no recovery."""
