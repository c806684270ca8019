"""What happened before each row: aggregates of events, made out of core.

The pass that counts also writes the events of each block, in the order in which they are known
(:mod:`.extract`). Their keys are numbered by hash (:mod:`.key_numbers`). Then each block writes its
rows and events by ranges of keys (:mod:`.partitions`), each of these partitions is merged in the
order of time and summed up apart (:mod:`.sums`), and each block collects what was summed up before
its rows (:mod:`.partitioned_sums`). Moments are computed of these, and the pass that encodes adds
the aggregates to its rows as dense columns (:mod:`.event_values`).

Each step is a task of the engine, for a block, a partition or a group, in a thread or on a worker
of a cluster. A task writes files of its own, and only counts come back.
"""
