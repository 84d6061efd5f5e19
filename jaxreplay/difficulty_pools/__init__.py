"""Difficulty pools: a curriculum that sets aside tasks that are too easy or too hard."""

from jaxreplay._common.task_keys import task_key as task_key
from jaxreplay.difficulty_pools._pools import DifficultyPools as DifficultyPools
from jaxreplay.difficulty_pools._state import PoolsState as PoolsState
