"""Labels from other files than the log: clicks that come later, each of which belongs to a row.

A row is written once its clicks are known: when the longest window of its labels has ended, as of
the newest time in the log and in the files of clicks. Until then it waits, and the day that is
added next reads its file again. So each run or extension writes the rows between two times.
"""
