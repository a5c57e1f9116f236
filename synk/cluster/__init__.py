"""Runtimes over several nodes. Each node has an agent; the ranks of all nodes are ranks of the program's engine.

**Who talks.** An agent is a child of the program or, on another machine, of an actor of Ray that a child of the
program calls. It starts the node's ranks, is the program to them, and runs no code of the user's. Program and agent
exchange lists of events (``post``), which never block: orders, bodies and signals down; replies, ends and what was
printed up. All events of one step of the engine go as one message a node. On Ray it is the argument of a call of the
actor, and what comes up are the values of one call that lasts as long as the agent.

**Orders and replies** travel unopened, each with the number of the rank's start, so that nothing is heard of a rank
that was replaced. Things, ``known`` and ``held``, captures, residents, plans and recovery are those of one machine,
for each rank. Ranks that are told the same share one pickle in a message.

**Memory.** What the program tells ranks of has a number on the node, and a twin there in which the agent writes
before it passes an order on: the rows of the node's ranks, whole arrays, objects, and of variables the fronts that
have changed and the words. ``Data`` stays in the program; its rows travel as those of arrays. With a reply comes up
what the rank has written: its outputs, and the values that it has assigned. The agent knows where they lie from the
layouts in replies and from notes about plans and variables. So the program has all values, and a node that is lost
takes none along.

**Ends.** An agent tells of the end of a rank, after all that the rank has said. The end of an agent is the end of its
ranks; the next operation starts another one, to which nothing is known. An interrupt or a kill is an event: an agent
waits for no rank, and one that does not answer is killed itself after two seconds. Before an operation agents that
were quiet are asked, so that a rank which ended while idle is replaced and fails no call. When a rank has failed, the
others have .2 s to end by themselves, then they are interrupted. If the program ends, the kernel ends the agents with
it, and the ranks with them.

**Reductions.** Small outputs are combined by the program as on one machine. Large ones it combines by the very steps
that the ranks of one machine take, in the order of ranks: the same bits. ``synk.comm`` meets in shared memory within
a node and by wires between nodes, in rank order.

``split`` is pure. ``nodes``, ``session`` and ``forking`` run in the program, ``relay`` on the nodes, ``ray_tunnel`` and
``ray_machines`` between them on a cluster.
"""
