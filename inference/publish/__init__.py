"""Directories of published bundles: check, compare, switch, roll back.

::

    SERVED/current           symbolic link to the bundle that is served: bundles/NAME
    SERVED/bundles/NAME/     the bundles, by the first digits of their digests
    SERVED/history.json      what was published and rolled back, see :mod:`.store`
    SERVED/.lock             held while a command works on the directory

The link is switched by a single rename, after all else is on the disk. So, however a command ends,
``current`` leads to one whole bundle, the old or the new.
"""
