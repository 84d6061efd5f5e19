"""Curricula: choose the tasks or levels to train on, by pools of difficulty or by a score."""

from jaxreplay.curricula import scores as scores
from jaxreplay.curricula._levels import Levels as Levels
from jaxreplay.curricula._levels import LevelsState as LevelsState
from jaxreplay.curricula._pool_state import PoolsState as PoolsState
from jaxreplay.curricula._pools import DifficultyPools as DifficultyPools
from jaxreplay.curricula._task_lists import task_key as task_key
from jaxreplay.curricula._tasks import Tasks as Tasks
from jaxreplay.curricula._tasks import TasksState as TasksState
