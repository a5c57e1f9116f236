"""The engine: one way of a call.

Read a call in this order: ``function``, ``arguments``, ``plan``, ``engine``, ``rank_call``, ``outputs``. Files whose
name begins with ``rank`` run on a rank, the others in the program; ``wire`` and ``inline`` belong to both.

**Channels.** Each rank has a pipe down (orders, 96 bytes), a pipe up (replies, 56 bytes), a SEQPACKET socket for bodies
with descriptors, and a pidfd. An order or a reply is one ``write`` below PIPE_BUF: it is there as a whole or not at
all, whoever is interrupted or killed. A body goes before its order or reply, as a packet that bears the same number, so
a body without an order is skipped by its number. What is longer than a packet lies in a memory file of its own, whose
descriptor comes with the packet. So nobody ever blocks in a write.

**Orders and replies.** An order has the number of the message, the plan, the last call with state that was committed on
this rank, the last that ended, how many object parts lie in place, whether there is a body, and the rows: low, high,
start, step, and start and step in the rank's own shard. Plan 0 is SYNC (answer, and tell anew what you have told), -1
LOAD (take the news and answer), -2 CLOSE. A reply has the number, a status, and when the rank took the order, began and
ended the user's function, and replied. DONE: the outputs lie in known slots. PLACED: large ones lie in the result; the
order named their destination there, in place of the plan. TOLD: a body says what is new about outputs, brings objects,
or memory that the rank has made. FAILED: an exception. UNREAD: the news could not be taken in. INTERRUPTED.

**Things.** All that a rank can know has a number (memory, plan, variable, resident object, question), and says what
must be known before it. ``Worker.known`` is one set of numbers. ``Workers.send`` brings with an order what the rank
lacks, what is needed first. The rank's side is one dict, ``Rank.held``. Captured objects are parcels of the book
(``_master.code``), which all ranks load in their order. UNREAD takes numbers out of ``known`` again.

**The life of a plan.** A plan is found by the look of a call: kinds, dtypes and trailing shapes of the arguments, the
options, the lane. It holds what the look fixes: places in the lane's staging memory with room for so many rows, what
ranks must know, how outputs are combined. The number of rows is no part of the look: it travels in the order. A plan is
made anew only when its places are outgrown, its lane has new staging memory, ``Data`` that it names was replaced, or
the function refers to other variables than before. There is no epoch: a new rank lacks the plan, and is told.

**The life of a call.** Made; sent (it is in ``flight``, and its lane is its own, before the first byte goes); ended. It
ends in ``Call.settle`` or, with all others in flight, in ``Workers.recover``, and nowhere else. ``settle`` takes the
steps hear, learn, reduce, build, commit. An exception ends its own call. A death, a time limit and Ctrl-C end all in
flight.

**Recovery.** ``is_sure`` is False while something is done that could be left torn: replies that are read and not filed,
an order that reached some ranks only. Whoever finds it False begins with ``recover``: finish a commit that was decided,
end the calls in flight, write the word ``INTERRUPT`` of each rank (calls up to this number are to end), SIGINT, SYNC to
all ranks of those calls, also to those that had answered, for what they told may be lost; drop what they say until they
answer the SYNC; kill whoever stays silent for two seconds. It may itself be broken off and begun again.

**Who writes what, who reads it, what orders it.**

- ``Down.INTERRUPT`` of a rank: the program, before a SIGINT; the rank, in its handler and where user code begins.
  Alone: eight bytes that only rise.
- rows and number of a lane's call (``Down``): the program, while no call is in the lane; ranks, between order and
  reply.
- phase and memory of a rank (``Up``): the rank; the program, for reports only.
- ``fronts[rank]`` of a variable: the program, while no call that uses it is in flight; the program and that rank. Pipe.
- the own places A and B of a rank's variable: the rank writes the one that is no front, the program either while the
  rank is idle. The common places: the program, the one that is nobody's front. Nobody ever writes into a front.
- ``counts`` of a variable: the program, before it writes to a place. What a device holds for the place is then out of
  date. A value that a function assigns on a device lies there alone, until its rank brings it to its place in memory.
- staging memory of a lane: the program, after the lane's last call ended; ranks read it between order and reply, by
  mappings that are private, so that a page which a function keeps can be frozen for it.
- ``Data``: the program, after the calls that read it ended.
- slots, and places that a rank has made for itself: that rank, between order and reply; the program until the call
  ends; other ranks in a reduction. The rank tells of them with a reply, and again after a SYNC.
- results: the ranks in a reduction, then the program and its user alone.

Every reader comes out of a system call on the pipe that the writer's later call went into. Nothing is polled but
descriptors, so no fences are needed, on x86-64 and AArch64. Memory is freed by the kernel with its last mapping.

**Who may be dead.** Any rank, at any line. The program keeps both ends of the pipe down, so a write to a dead rank
fails nowhere and is read by nobody; the pidfd tells. A reply that came before a death counts. Before an error tells
of a death the others are made idle, so that it names all who have died. Who writes what answers nothing that was asked
is killed. A replaced rank knows
nothing: the next order brings what it needs. Values of variables lie in memory that the program holds too, so
``fronts`` is all there is to restore. A resident object comes from the lowest rank that has it. After a call that was
to change objects and failed, ranks are asked what has become of them: see ``residents``. If the program dies, the
lifelines of ``_wire.lifeline`` end the ranks.

**Commits.** What a call assigned lies in places that are no fronts. ``redo`` holds the moves, one store decides, and
``finish_commit`` can be done again. ``committed`` is kept for each rank: a rank that failed in one call and had no rows
in the next must not take that next commit for its own.

**Devices.** A rank with a device (``rank_device``) brings inputs there before the function runs, and those of the next
call, if its order has come, while the function computes there. It waits for the device once in a call, before it
replies. Large outputs that no other rank must read stay on the device until they are asked for, and go from there to
their places in the result; where NCCL joins the ranks (``group``) it reduces them on the way.

**Nodes.** To the engine a rank of a node is a rank: it has a number among all, its own order and reply, and everything
above holds. What differs is memory, and ``synk.cluster`` has all of it: a node's agent starts the ranks, has a twin of
each memory that they map, and passes orders and replies on. ``Engine.carry`` brings what a call reads before it is
rung, ``note_written`` says which places of variables the program has changed, and what ranks write comes with their
replies, to where it would lie on one machine. ``Engine.reduce`` takes the steps of the ranks in the program, in their
order. So the bits of a result are those of one machine.

**Maps.** A chunk of items is an order to one rank: its body brings a thing, known once, with the items (``pool`` sends,
``jobs`` says what comes next, ``rank_items`` runs them). Large arrays of items are memory that a rank is told of once;
those of results come with the reply. Calls and chunks are never in flight together. Chunks are independent: a rank that
dies, or that is ended, loses its own, and the words ITEM and ITEM_NS (``Up``; the rank writes them, the program only
looks) say at which item it was, and since when.

``tests/engine/passing.txt`` lists the files of the suite that pass on it (``make next``). The list only grows, and the
engines are switched when all of it is there.
"""
