"""Slices, arenas, copies, commits and the storage tier."""
