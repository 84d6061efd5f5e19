"""Checkpoints: a state is saved, restored bit for bit, and migrated to another configuration."""

from jaxreplay.checkpoint._checkpoint import restore as restore
from jaxreplay.checkpoint._checkpoint import save as save
from jaxreplay.checkpoint._migration import migrate as migrate
