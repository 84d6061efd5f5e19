"""Checkpoints: save a state, restore it bit for bit, or migrate it to another configuration."""

from jaxreplay.checkpoint._checkpoint import restore as restore
from jaxreplay.checkpoint._checkpoint import save as save
from jaxreplay.checkpoint._migration import migrate as migrate
