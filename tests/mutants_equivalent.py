"""Mutants that change nothing that a user could see, by name, and why."""

EQUIVALENT: dict[str, str] = {}
