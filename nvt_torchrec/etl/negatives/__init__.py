"""Negative rows: for each row with label 1, rows with the same user and other items, drawn.

They are added to the rows of a block as it is read, before tables are joined and events summed.
All later steps treat them as if the log held them, except that they are no events.
"""
