"""Negative rows: for each row with label 1 others with the same user and another item.

They are added to the rows of a block as it is read, before tables are joined and events summed up,
so that whatever follows takes them as if the log held them; only events they are not.
"""
