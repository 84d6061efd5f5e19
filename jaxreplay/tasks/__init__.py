"""Curricula: tasks and levels that are drawn by a score."""

from jaxreplay.tasks._levels import Levels as Levels
from jaxreplay.tasks._levels import LevelsState as LevelsState
from jaxreplay.tasks._regret import max_monte_carlo as max_monte_carlo
from jaxreplay.tasks._regret import positive_value_loss as positive_value_loss
from jaxreplay.tasks._scores import Score as Score
from jaxreplay.tasks._scores import Thompson as Thompson
from jaxreplay.tasks._scores import learnability as learnability
from jaxreplay.tasks._scores import success_band as success_band
from jaxreplay.tasks._scores import thompson as thompson
from jaxreplay.tasks._scores import uncertainty as uncertainty
from jaxreplay.tasks._tasks import Tasks as Tasks
from jaxreplay.tasks._tasks import TasksState as TasksState
