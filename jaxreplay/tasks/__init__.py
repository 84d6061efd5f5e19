"""Curricula: tasks drawn by a score of their successes and trials."""

from jaxreplay.tasks._scores import Score as Score
from jaxreplay.tasks._scores import Thompson as Thompson
from jaxreplay.tasks._scores import learnability as learnability
from jaxreplay.tasks._scores import success_band as success_band
from jaxreplay.tasks._scores import thompson as thompson
from jaxreplay.tasks._scores import uncertainty as uncertainty
from jaxreplay.tasks._tasks import Tasks as Tasks
from jaxreplay.tasks._tasks import TasksState as TasksState
