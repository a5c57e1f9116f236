"""The public names: what ``dir()`` shows of each module and object, and the options of the verbs that have most.

A name more is a promise more. ``LATER`` has what is not yet as it should be, and why; a row whose reason is gone fails.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import synk
import synk.profiler
import synk.torch

NAMES = {
    "synk": """Data Executor Function ItemError Op PendingCall Program Resident Runtime Shared all_gather all_reduce
        broadcast close comm current data distribute errors fork freeze_support function gather info map profile
        profiler reduce replay resident scatter shared torch""",
    "synk.errors": """SynkError CallCancelled CallTimeout ClosedError CollectiveMismatch NotForkedError OpMismatch
        ReentrancyError RemoteError SerializationError SharedMemoryError StartupError UnsupportedError WorkerDied""",
    "synk.comm": """all_gather all_reduce all_to_all barrier broadcast device gather irecv isend rank ranks recv reduce
        reduce_scatter rng rows scatter send total_rows wait_all world_size""",
    "synk.torch": """DataParallel mean process_group replicate total all_gather all_reduce all_to_all broadcast gather
        irecv isend recv reduce reduce_scatter scatter send""",
    "synk.profiler": "cprofile span trace",
    "Runtime": """backend close data devices distribute function info interrupt is_closed map profile resident restart
        shared stacks timeout world_size""",
    "Function": "outputs repeat serial stream submit verify",
    "PendingCall": "add_done_callback done exception name ranks result",
    "Executor": "map shutdown submit",
    "Program": "close load on save sync_to_parent values",
    "Shared": "dtype is_sharded lengths name shape shapes value",
    "Resident": "get load name save set value",
    "Data": """T alloc_size astype copy data dtype free_memory max mean min name nbytes ndim reshape set_length
        set_shape set_value shape size std sum tolist var""",
    "fork": "num_workers backend devices timeout max_restarts on_restart seed check cluster nodes",
    "function": "fn bcast_inputs outputs updates per_rank framework retry on_oom reproducible",
    "f()": "args batch num_slices output_subset timeout kwargs",
    "data": "value dtype shape ndim force_cast oversize name",
    "shared": "value sharded name",
    "map": """fn iterables batch_size ordered progress on_error item_timeout max_tasks_per_worker max_worker_memory
        journal key version""",
}

LATER = {
    "synk.comm": {
        "shielded": "residents have no other way yet",
    },
    "synk.torch": {
        "Replicated": "a class that replicate makes", "StepFunction": "a class that replicate makes",
    },
    "Runtime": {"counters": "what the tests of messages count", "where": "the phases, which stacks does not show"},
}  # fmt: skip


def shown(rt: synk.Runtime) -> dict[str, Any]:
    """Return each object of ``NAMES`` that is looked at by ``dir()``."""
    f = rt.function(lambda x: x.sum(), outputs="sum")
    call = f.submit(np.ones(4))
    call.result()
    return {
        "synk": synk, "synk.errors": synk.errors, "synk.comm": synk.comm, "synk.torch": synk.torch,
        "synk.profiler": synk.profiler, "Runtime": rt, "Function": f, "PendingCall": call, "Executor": synk.Executor,
        "Program": synk.Program(f), "Shared": rt.shared(np.zeros(3)), "Resident": rt.resident({}),
        "Data": rt.data(np.zeros(3)),
    }  # fmt: skip


VERBS = {
    "fork": synk.fork, "function": synk.function, "f()": synk.Function.__call__, "data": synk.data,
    "shared": synk.shared, "map": synk.map,
}  # fmt: skip


def test_the_public_names_are_those_of_the_lists(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    found = {owner: {name for name in dir(each) if name[0] != "_"} for owner, each in shown(shared_runtimes[2]).items()}
    found |= {verb: {*inspect.signature(each).parameters} - {"self"} for verb, each in VERBS.items()}
    assert found.keys() == NAMES.keys()
    for owner, names in found.items():
        with subtests.test(owner=owner):
            assert names ^ {*NAMES[owner].split()} == {*LATER.get(owner, {})}
