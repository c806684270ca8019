"""The ground floor: feature spec, raw click logs, files on disk.

Knows no NVTabular, Dask or torch.
"""

#: The version of all packages of this project; pyproject.toml reads it from here.
__version__ = "0.1.0"
