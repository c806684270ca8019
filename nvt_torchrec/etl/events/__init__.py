"""What happened before each row: aggregates of events, made out of core.

The pass that counts also writes the events of each block, in the order in which they are known
(:mod:`.extract`). Then they pass by in the order of time (:mod:`.timeline`), and what the events
before each row sum up to is written beside the block (:mod:`.sums`); memory holds the sums of all
keys, and a chunk of events. Moments are computed of these, and the pass that encodes adds the
aggregates to its rows as dense columns (:mod:`.event_values`).
"""
