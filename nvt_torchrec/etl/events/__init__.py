"""Aggregates over the events before each row, computed out of core.

1. The counting pass also writes the events of each block, in the order in which they become known
   (:mod:`.extract`).
2. The keys of all events are numbered in the order of their hashes (:mod:`.key_numbers`).
3. Each block writes its rows and events by ranges of keys (:mod:`.partitions`).
4. Each of these partitions is merged in the order of time and summed (:mod:`.sums`).
5. Each block collects the sums before its rows (:mod:`.partitioned_sums`).
6. The encoding pass adds the aggregates to its rows as dense columns (:mod:`.event_values`).

Each step consists of engine tasks, for a block, a partition or a group, which run in threads or on
the workers of a cluster. A task writes its own files, and returns only counts.
"""
