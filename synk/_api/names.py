"""The public names that need the program's half. A program imports them with synk, a worker only when it uses one."""

from synk._api.build import function as function
from synk._api.collectives import all_gather as all_gather
from synk._api.collectives import all_reduce as all_reduce
from synk._api.collectives import broadcast as broadcast
from synk._api.collectives import gather as gather
from synk._api.collectives import reduce as reduce
from synk._api.collectives import scatter as scatter
from synk._api.current import close as close
from synk._api.current import current as current
from synk._api.current import fork as fork
from synk._api.function import Function as Function
from synk._api.replay import replay as replay
from synk._api.runtime import Runtime as Runtime
from synk._api.verbs import data as data
from synk._api.verbs import distribute as distribute
from synk._api.verbs import info as info
from synk._api.verbs import map as map  # not in synk.__all__: a star import would hide the built-in
from synk._api.verbs import profile as profile
from synk._api.verbs import resident as resident
from synk._api.verbs import shared as shared
from synk._engine.data import Data as Data
from synk._engine.pending import PendingCall as PendingCall
from synk._engine.resident import Resident as Resident
from synk._engine.shared import Shared as Shared
