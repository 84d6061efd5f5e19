"""Sum tree: a discrete distribution over `capacity` leaves that is cheap to update and to sample."""

from jaxreplay.sum_tree._restricted import restrict as restrict
from jaxreplay.sum_tree._tree import SumTree as SumTree
from jaxreplay.sum_tree._tree import default_fanout as default_fanout
from jaxreplay.sum_tree._tree import find as find
from jaxreplay.sum_tree._tree import get as get
from jaxreplay.sum_tree._tree import init as init
from jaxreplay.sum_tree._tree import leaves as leaves
from jaxreplay.sum_tree._tree import maximum as maximum
from jaxreplay.sum_tree._tree import minimum as minimum
from jaxreplay.sum_tree._tree import of_leaves as of_leaves
from jaxreplay.sum_tree._tree import sample as sample
from jaxreplay.sum_tree._tree import sample_with as sample_with
from jaxreplay.sum_tree._tree import total as total
from jaxreplay.sum_tree._tree import update as update
from jaxreplay.sum_tree._tree import with_fanout as with_fanout
