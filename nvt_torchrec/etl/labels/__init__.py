"""Labels from files other than the log: later clicks, each of which belongs to a row.

A row is written once all of its clicks are known, that is, once the longest window of its labels
has ended before the newest time in the log. Until then it waits, and the next day that is added
reads its file again. So each run or extension writes the rows between two times.
"""
