"""A custom derivation: the domain of a URL as a categorical column.

    python own_derivation.py clicks.csv OUT

It takes one class, and one line in the registry. The same code computes the values for blocks of
the log and for rows to score. Every program that reads the spec or the saved workflow must import
this module to register the derivation. Processes of --engine dask import the script that started
them, so the registration must be outside of `if __name__ == "__main__"`.
"""

import sys

import pyarrow.compute as pc

from nvt_torchrec import Encoder, EtlSettings, run
from nvt_torchrec.formats.feature_spec.derivations import DERIVATIONS, DerivedValue

SPEC = """
[input]
format = "csv"

[label]
name = "clicked"

[[categorical]]
names = "domain"
from = "url"
derive = "domain"
"""


class Domain(DerivedValue):
    """The domain of https://www.example.org/a and of http://example.org:80 is example.org."""

    name, column = "domain", "categorical"
    reads, gives = "string", "string"  # raw types

    def compute(self, sources, how):
        """Return the column for all rows; if a source is missing, so is the result."""
        (urls,) = sources
        pattern = r"^(?:[a-z]+://)?(?:www\.)?([^/:?#]*).*$"
        return pc.replace_substring_regex(urls, pattern, r"\1")


DERIVATIONS["domain"] = Domain()

if __name__ == "__main__":
    log, output = sys.argv[1:]
    with open(f"{output}.toml", "w") as file:
        file.write(SPEC)
    print(run(EtlSettings(log, output, f"{output}.toml", engine="cpu")).rows)
    encoder = Encoder.load(f"{output}/workflow")
    same = [{"url": "https://www.example.org/a"}, {"url": "example.org"}, {"url": None}]
    print(encoder.encode(same)[1].to_dict()["domain"].values().tolist())
