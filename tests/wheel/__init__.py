"""The distributions: how they are built, and what they do without a checkout.

`python -m tests.wheel` installs the wheel as a user does, in an empty environment of
each Python.
"""
