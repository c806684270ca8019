"""Bundles with vectors: what they hold, and files of them that are damaged or made to harm."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SchemaError
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.formats.workflow_description import METADATA_FILE
from nvt_torchrec.inference.model.bundle import FORMAT, read_bundle
from nvt_torchrec.inference.model.served_checkpoint import check_same_interface
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.publish.trial import try_bundle
from nvt_torchrec.inference.server.batching import Batcher
from tests.inference.vector_shops import VectorShop, make_vector_shop

VALUES = "workflow/vectors/text/0/values.npy"
WIDE = 10**9


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> VectorShop:
    return make_vector_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def whole(shop: VectorShop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shop.save_bundle(tmp_path_factory.mktemp("bundles") / "bundle")


@pytest.fixture
def bundle(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(whole, tmp_path / "bundle")


def list_again(bundle: Path) -> None:
    """Write the sizes and digests of a bundle's files as somebody does who means harm."""
    workflow = read_json(bundle / "workflow" / METADATA_FILE, "a workflow")
    for name in workflow["files"]:
        workflow["files"][name] = FileEntry.from_file(bundle / "workflow" / name).to_dict()
    (bundle / "workflow" / METADATA_FILE).write_text(json.dumps(workflow))
    described = read_json(bundle / "bundle.json", "a bundle")
    for name in described["files"]:
        described["files"][name] = FileEntry.from_file(bundle / name).to_dict()
    FORMAT.write(bundle / "bundle.json", described)


def test_a_bundle_has_the_vectors(shop: VectorShop, bundle: Path) -> None:
    expected = shop.predictor.predict(shop.requests)
    listed = read_json(bundle / "bundle.json", "a bundle")["files"]
    assert {VALUES, "workflow/vectors/image/0/values.npy"} <= listed.keys()
    np.testing.assert_array_equal(
        Predictor.load(bundle, check=True).predict(shop.requests), expected
    )
    try_bundle(bundle)


@pytest.mark.parametrize("file", [VALUES, "workflow/tables/items/text.codes.npy"])
def test_damaged_files(bundle: Path, file: str) -> None:
    content = (bundle / file).read_bytes()
    (bundle / file).write_bytes(content[:-4])
    with pytest.raises(BadInputError, match=rf"{file}: \d+ bytes instead of {len(content)}"):
        Predictor.load(bundle)
    (bundle / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BadInputError, match=rf"{file}: not the file that was written"):
        Predictor.load(bundle, check=True)
    (bundle / file).unlink()
    with pytest.raises(BadInputError, match=f"{file}: missing"):
        Predictor.load(bundle)


def test_a_file_that_is_cut_short_while_it_is_served(shop: VectorShop, bundle: Path) -> None:
    predictor = Predictor.load(bundle)
    with open(bundle / VALUES, "r+b") as file:
        file.truncate(200)
    with pytest.raises(BadInputError, match="was written to or truncated while in use"):
        predictor.predict(shop.requests[:3])


def test_vectors_of_another_name(shop: VectorShop, bundle: Path) -> None:
    """Each is of a form of its own."""
    image = bundle / "workflow/vectors/image/0/values.npy"
    text = (bundle / VALUES).read_bytes()
    (bundle / VALUES).write_bytes(image.read_bytes())
    image.write_bytes(text)
    with pytest.raises(BadInputError, match="bytes instead of"):
        Predictor.load(bundle)
    list_again(bundle)
    with pytest.raises(ClickLogError, match=r"values\.npy: holds float16 .*, not float32"):
        Predictor.load(bundle)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(shop: VectorShop, bundle: Path, value: float) -> None:
    """They are found when they are read, whoever wrote the digests."""
    values = np.load(bundle / VALUES)
    values[:, 1] = value
    np.save(bundle / VALUES, values)
    list_again(bundle)
    predictor = Predictor.load(bundle)
    with pytest.raises(SchemaError, match=r"values\.npy: a value of vector \d+ is not finite"):
        predictor.predict(shop.requests)
    given = [{**row, "text": None} for row in shop.requests]  # the others are scored
    assert np.isfinite(predictor.predict(given)).all()


@pytest.mark.parametrize("number", [10**6, -5, -(2**31), 2**31 - 1])
def test_numbers_that_lead_outside(shop: VectorShop, bundle: Path, number: int) -> None:
    file = bundle / "workflow/tables/items/text.codes.npy"
    codes = np.load(file)
    codes[:] = number
    np.save(file, codes)
    list_again(bundle)
    predictor = Predictor.load(bundle)
    with pytest.raises(SchemaError, match=rf"vector {number} of text, which has \d+"):
        predictor.predict(shop.requests)


def test_the_server_refuses_them_with_a_sentence(shop: VectorShop, bundle: Path) -> None:
    """And scores the requests of other batches."""
    import asyncio

    values = np.load(bundle / VALUES)
    values[:] = np.nan
    np.save(bundle / VALUES, values)
    list_again(bundle)
    predictor = Predictor.load(bundle)
    bad = predictor.encode(shop.requests[:40])
    good = predictor.encode([{**row, "text": None} for row in shop.requests[:5]])
    batcher = Batcher(lambda batch: None)

    async def ask() -> None:
        with pytest.raises(SchemaError, match="not finite"):
            await batcher.score(predictor.predict_parts, bad)
        assert len(await batcher.score(predictor.predict_parts, good)) == 5

    try:
        asyncio.run(ask())
    finally:
        batcher.close()


def test_a_header_that_claims_more(shop: VectorShop, bundle: Path) -> None:
    content = bytearray((bundle / VALUES).read_bytes())
    rows = np.load(bundle / VALUES).shape[0]
    begin = content.index(b"'shape'")
    end = content.index(b"\n")
    header = f"'shape': ({rows}, {WIDE}), }}".encode()
    content[begin:end] = header.ljust(end - begin)
    (bundle / VALUES).write_bytes(content)
    with pytest.raises(BadInputError, match=r"values\.npy"):
        Predictor.load(bundle)


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("bundle.json", ("model", "dense_vectors", 0, "width")),
        ("workflow/metadata.json", ("spec", "vectors", 0, "width")),
        (".merlin/schema.json", ()),
    ],
)
@pytest.mark.parametrize("width", [WIDE, 0, -1, "3", 4, 2.5, None])
def test_widths_that_are_wrong(bundle: Path, file: str, path: tuple, width: object) -> None:
    """They are refused before anything of that size is allocated."""
    value = read_json(bundle / file, "a part of a bundle")
    if not path:
        columns = [f for f in value["feature"] if f["annotation"]["tag"] == ["vector"]]
        columns[0]["annotation"]["extraMetadata"][0]["width"] = width
    else:
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        assert inner[path[-1]] == 3
        inner[path[-1]] = width
    if file == "bundle.json":
        FORMAT.write(bundle / file, value)
    else:
        (bundle / file).write_text(json.dumps(value))
        list_again(bundle)
    tracemalloc.start()
    try:
        if file.startswith(".merlin"):
            Predictor.load(bundle)  # the schema is for other programs: it is not read
            return
        with pytest.raises(ClickLogError) as caught:
            Predictor.load(bundle)
        # digests are computed of 64 MiB at a time
        assert tracemalloc.get_traced_memory()[1] < 1 << 27
    finally:
        tracemalloc.stop()
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_another_width_is_another_interface(shop: VectorShop) -> None:
    import dataclasses

    spec = shop.predictor.spec
    wider = dataclasses.replace(spec.vectors[0], width=4)
    other = dataclasses.replace(spec, vectors=(wider, spec.vectors[1]))
    labels = shop.predictor.labels, shop.predictor.labels
    check_same_interface(spec, spec, labels, "BUNDLE")
    with pytest.raises(SchemaError, match="text has another position, type or format"):
        check_same_interface(spec, other, labels, "BUNDLE")


def test_a_model_of_other_vectors(shop: VectorShop, bundle: Path) -> None:
    value = read_json(bundle / "bundle.json", "a bundle")
    value["model"]["dense_vectors"].reverse()
    FORMAT.write(bundle / "bundle.json", value)
    with pytest.raises(ClickLogError, match=r"has the vectors text \(3 of float32\), image"):
        read_bundle(bundle, shop.predictor.model.device)
