"""What happened before each row: aggregates of events, made out of core.

One pass over the log writes, for each block and each group of columns (``of`` in the spec), its
events sorted by the hash of their key (:mod:`.extract`). Partitions, which are ranges of hashes,
are small enough for memory: the slices of all blocks are sorted by key and time, and what the
events before each row sum up to is written back beside the block (:mod:`.sums`). Reading a block
then adds the aggregates as dense columns (:mod:`.event_values`), so that counting and encoding
take them as columns of the log. Memory holds a partition for each thread; all rows of one key are
in one partition.
"""
