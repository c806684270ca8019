"""What happened before each row: aggregates of events, made out of core.

One pass over the log writes the events of each block, in the order in which they are known
(:mod:`.extract`). Then they pass by in the order of time (:mod:`.timeline`), and what the events
before each row sum up to is written beside the block (:mod:`.sums`); memory holds the sums of all
keys, and a chunk of events. Reading a block adds the aggregates as dense columns
(:mod:`.event_values`), so that counting and encoding take them as columns of the log.
"""
