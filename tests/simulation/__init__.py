"""A deterministic simulation of the control plane: one thread, a seeded scheduler.

The agent, leader, follower, membership, links, rendezvous and commit coordinator are
the real ones; time, threads, network, store, disks and trainers are simulated. See
`__main__.py`.
"""
