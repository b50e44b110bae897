"""Agents, membership, roles, recovery and the local cluster."""
