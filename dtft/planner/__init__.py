"""Plans: from a step, its arrays and a cluster to a mesh, shardings and what they cost.

Decides and never runs a model. Must not know hosts of a job, checkpoints or processes.
"""
