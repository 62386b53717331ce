# SPDX-License-Identifier: Apache-2.0
"""Data and options that cannot be: a sentence of the family, which names and counts what is wrong."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.images.pictures import TARGET, encode, pixels, recipe_of, source_of, spec, write_folder, write_shard
from tvm_convgrad.core.errors import ArtifactError, ConvGradError, DataError, UnsupportedError
from tvm_convgrad.core.index_range import IndexRange
from tvm_convgrad.training.runtime.images.folder import find_part, index_folder
from tvm_convgrad.training.runtime.images.index import accept_targets
from tvm_convgrad.training.runtime.images.options import FITS, ImageOptions, parse_augmentations
from tvm_convgrad.training.runtime.images.pillow import read_image
from tvm_convgrad.training.runtime.images.recipe import Recipe
from tvm_convgrad.training.runtime.images.shards import expand, index_shards
from tvm_convgrad.training.runtime.images.source import ImageSource
from tvm_convgrad.training.runtime.schema import TensorSpec
from tvm_convgrad.training.runtime.source import Order

SHAPE = (3, 6, 6)
PNG = encode(pixels(1, 6, 6, 3)[0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "set", pixels(9, 6, 6, 3))
    return tmp_path / "set"


def spoil(folder: Path) -> None:
    """Images that are cut off, of no format, missing, grey, of 16 bits, and empty."""
    (folder / "ant" / "0000.png").write_bytes(PNG[:60])
    (folder / "ant" / "0003.png").write_bytes(b"rubbish")
    (folder / "bee" / "0001.png").unlink()
    (folder / "bee" / "0001.png").symlink_to(folder / "nowhere.png")
    (folder / "bee" / "0004.png").write_bytes(encode(pixels(1, 6, 6, 1)[0]))
    Image.fromarray(np.zeros((4, 4), "uint16")).save(folder / "cat" / "0002.png")
    (folder / "cat" / "0005.png").write_bytes(b"")


@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_cannot_be_used_are_counted_and_named(folder: Path, workers: int) -> None:
    spoil(folder)
    with pytest.raises(ArtifactError) as error:
        source_of(folder, SHAPE, ImageOptions(workers=workers))
    text = str(error.value)
    assert "6 of 9 images cannot be used: ant/0000.png (" in text
    assert "ant/0003.png (its format is unknown)" in text
    assert "bee/0001.png (it is missing)" in text
    assert "bee/0004.png (it has 1 channels (mode L), the model's input 3)" in text
    assert "cat/0002.png (its mode I;16 is not of 8 bits a channel) and 1 more; mend or remove them." in text


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def deep_png(channels: int) -> bytes:
    """A PNG of 6 x 6 pixels with 16 bits a channel, which Pillow cannot write for colours."""
    kind = {3: 2, 4: 6}[channels]
    rows = bytes(6 * (1 + 6 * channels * 2))
    head = struct.pack(">IIBBBBB", 6, 6, 16, kind, 0, 0, 0)
    return PNG[:8] + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "content", [deep_png(3), deep_png(4), b"P6 6 6 65535\n" + bytes(216)], ids=["RGB", "RGBA", "ppm"]
)
def test_colours_of_16_bits_are_refused(content: bytes) -> None:
    """Pillow would drop half of them without a word."""
    with pytest.raises(ArtifactError, match="it has more than 8 bits a channel"):
        read_image(content, 3, convert=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_decoded_in_the_run_ends_it(folder: Path, workers: int) -> None:
    source = source_of(folder, SHAPE, ImageOptions(workers=workers, memory=0))
    (folder / "bee" / "0004.png").write_bytes(PNG[:-30])
    with pytest.raises(DataError, match=r"1 of the 9 images cannot be used: bee/0004\.png \("):
        list(source.batches(Order(0, 0, 9)))
    source.close()


def test_channels_are_converted_if_that_is_wanted(tmp_path: Path) -> None:
    """Palettes count as colours without it."""
    grey = pixels(1, 6, 6, 1)[0]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(encode(grey))
    Image.fromarray(np.repeat(grey, 3, 2)).quantize(256).save(tmp_path / "a" / "2.png")
    Image.fromarray(np.repeat(grey, 3, 2)).convert("RGBA").save(tmp_path / "a" / "3.png")
    (batch,) = source_of(tmp_path, SHAPE, ImageOptions(convert=True, workers=0)).in_order(3)
    wanted = np.broadcast_to((grey[..., 0] / 255.0).astype("float32"), SHAPE)
    np.testing.assert_array_equal(batch.inputs[0][0], wanted)
    np.testing.assert_array_equal(batch.inputs[0][2], wanted)
    with pytest.raises(ArtifactError, match=r"2 of 3 images .* a/1\.png .*1 channels.* a/3\.png .*4 channels"):
        source_of(tmp_path, SHAPE, ImageOptions(workers=0))


@pytest.mark.parametrize("fit", FITS)
def test_fits(tmp_path: Path, fit: str) -> None:
    """An image twice as wide as high: dark at the left, bright at the right, and 100 in the middle half."""
    image = np.full((6, 12, 1), 100, "uint8")
    image[:, :3], image[:, 9:] = 50, 250
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(encode(image))
    (batch,) = source_of(tmp_path, (1, 6, 6), ImageOptions(fit=fit, workers=0)).in_order(1)
    found = np.round(batch.inputs[0][0, 0] * 255)
    if fit == "crop":
        assert (found == 100).all()
        return
    rows = found if fit == "stretch" else found[2:4]
    assert (rows[:, 0] < 60).all()
    assert (rows[:, 5] > 200).all()
    assert ((found[[0, 5]] == 0).all()) == (fit == "pad")


def test_folders_without_classes(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "loose").mkdir()
    with pytest.raises(ArtifactError, match=r"loose: a folder without classes; give one of folder/class"):
        index_folder(tmp_path / "loose")
    (tmp_path / "loose" / "a.png").write_bytes(PNG)
    with pytest.raises(ArtifactError, match="a folder without classes; its images have to be in folders"):
        index_folder(tmp_path / "loose")
    (folder / "dog").mkdir()
    (folder / "dog" / "a.txt").write_text("")
    with pytest.raises(ArtifactError, match=r"1 of 4 classes have no image \(dog\)"):
        index_folder(folder)
    with pytest.raises(ArtifactError, match=r"the classes cat, dog are not among the 2 of the .* data \(ant, bee"):
        index_folder(folder, ("ant", "bee"))


def test_parts(tmp_path: Path) -> None:
    """A folder is its own training data, unless it has folders of classes called train, val or test."""
    write_folder(tmp_path / "a", pixels(3, 6, 6, 3), ("ant", "test", "train"))
    assert find_part(tmp_path / "a", "train", plain=True) == tmp_path / "a"
    assert find_part(tmp_path / "a", "test", plain=False) is None
    write_folder(tmp_path / "b" / "train", pixels(3, 6, 6, 3))
    write_folder(tmp_path / "b" / "val", pixels(1, 6, 6, 3), ("cat",))
    assert find_part(tmp_path / "b", "val", plain=False) == tmp_path / "b" / "val"
    assert find_part(tmp_path / "b", "test", plain=True) is None
    assert index_folder(tmp_path / "b" / "val", ("ant", "bee", "cat")).targets.tolist() == [2]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.png": PNG}, r"1 of 1 samples cannot be used: s\.tar:a has no label"),
        ({"a.cls": b"1"}, "a has no image"),
        ({"a.png": PNG, "a.jpg": PNG, "a.cls": b"1"}, "a has several images or labels"),
        ({"a.png": PNG, "a.cls": b"one"}, r"a has a label \.cls that cannot be read \(invalid literal"),
        ({"a.png": PNG, "a.json": b'{"name": 1}'}, r"a has a label \.json that cannot be read \(it is neither"),
        ({"a.png": PNG, "a.json": b"{"}, r"a has a label \.json that cannot be read"),
        ({"a.png": PNG, "a.npy": b"\x93NUMPY"}, r"a has a label \.npy that cannot be read"),
        ({"a.txt": b"1"}, "the shards have no samples"),
        ({"a.png": PNG, "a.json": b"1", "b.png": PNG, "b.json": b"[1, 2]"}, r"targets are of several shapes"),
        (
            {"a.png": PNG, "a.cls": b"3", "b.png": PNG, "b.cls": b"-1", "c.png": PNG, "c.cls": b"2"},
            r"2 of 3 samples have class numbers that the model does not have, such as 3 \(s\.tar:a, s\.tar:b\); it ",
        ),
    ],
)
def test_shards_that_cannot_be_used(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    write_shard(tmp_path / "s.tar", files)
    target = replace(TARGET, range=IndexRange.of_classes(3))
    with pytest.raises(ArtifactError, match=message):
        accept_targets(index_shards(tmp_path / "s.tar"), target, "class numbers")


def test_shards_that_cannot_be_opened(tmp_path: Path) -> None:
    write_shard(tmp_path / "s-0.tar", {"a.png": PNG, "a.cls": b"1", "b.png": PNG * 9, "b.cls": b"1"})
    with pytest.raises(ArtifactError, match=r"2 of 3 shards are not there: .*s-1\.tar, .*s-2\.tar\."):
        index_shards(tmp_path / "s-{0..2}.tar")
    whole = (tmp_path / "s-0.tar").read_bytes()
    for content in (b"rubbish" * 100, b"", whole[:1700], whole[:2048]):
        (tmp_path / "s-1.tar").write_bytes(content)
        with pytest.raises(ArtifactError, match=r"s-1\.tar: the shard cannot be opened"):
            index_shards(tmp_path / "s-1.tar")
    with pytest.raises(ArtifactError, match="expand to no shard"):
        index_shards(tmp_path / "s-{2..1}.tar")


def test_a_shard_that_is_cut_off_during_the_run(tmp_path: Path) -> None:
    write_shard(tmp_path / "s.tar", {"a.cls": b"1", "a.png": PNG})
    index = index_shards(tmp_path / "s.tar")
    (tmp_path / "s.tar").write_bytes((tmp_path / "s.tar").read_bytes()[:1600])
    with pytest.raises(ArtifactError, match=r"s\.tar:a \(its shard has become shorter\)"):
        source_of(index, SHAPE, ImageOptions(workers=0))


def test_braces() -> None:
    assert expand("a-{9..11}.tar") == ["a-9.tar", "a-10.tar", "a-11.tar"]
    assert expand("a-{09..11}.tar") == ["a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand("a.tar") == ["a.tar"]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([spec(3, 6, 6), spec(3, 6, 6)], {}, "fill one input, but the model has 2"),
        ([spec(16)], {}, r"images are \[batch, channels, height, width\]"),
        ([spec(3, "h", 6)], {}, "images are"),
        ([spec(3, 4, 1)], {}, "has the channels is ambiguous"),
        ([spec(2, 6, 6)], {}, "has the channels is ambiguous"),
        ([spec(3, 6, 6, dtype="int8")], {}, "cannot hold pixels"),
        ([spec(3, 6, 6, dtype="uint8")], {"mean": (0.5,)}, "leave them out"),
        ([spec(3, 6, 6)], {"mean": (0.5, 0.5)}, "--mean has 2 numbers, .* has 3 channels"),
        ([spec(3, 6, 6)], {"std": (1.0, 0.0, 1.0)}, "--std 1.0,0.0,1.0: give finite numbers, and positive"),
        ([spec(3, 6, 6)], {"fit": "zoom"}, "--fit zoom"),
    ],
)
def test_recipes_that_cannot_be(inputs: list[TensorSpec], options: dict, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Recipe.of(inputs, TARGET, ImageOptions(**options), {})


def test_pixels_that_move_need_targets_that_do_not() -> None:
    target = TensorSpec("mask", ("n", 6, 6), "int64")
    with pytest.raises(UnsupportedError, match=r"--augment flip moves pixels, and the target 'mask'"):
        Recipe.of([spec(3, 6, 6)], target, ImageOptions(augment=("jitter", "flip")), {})
    assert Recipe.of([spec(3, 6, 6)], target, ImageOptions(augment=("jitter", "erase")), {}).augment


def test_normalisation_of_the_build_and_its_overflow(tmp_path: Path) -> None:
    recipe = Recipe.of([spec(3, 6, 6)], TARGET, ImageOptions(std=(2.0,)), {"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]})
    assert (recipe.mean, recipe.std) == ((0.1, 0.2, 0.3), (2.0, 2.0, 2.0))
    write_folder(tmp_path, pixels(3, 6, 6, 3))
    with pytest.raises(ArtifactError, match="beyond float16"):
        ImageSource(
            index_folder(tmp_path), recipe_of(SHAPE, ImageOptions(std=(1e-6,)), "float16"), ImageOptions(workers=0)
        )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["turn"], "'turn' is not one of flip"),
        (["flip:q=1"], "flip takes p, not 'q'"),
        (["flip:p=2"], "p has to be a number from 0 to 1, not '2'"),
        (["flip:p=nan"], "not 'nan'"),
        (["flip:p"], "not ''"),
        (["crop:padding=1.5"], "a whole number from 1 to 4096"),
        (["flip", "resized"], "give it first"),
        (["resized", "resized"], "give it first"),
    ],
)
def test_augmentations_that_cannot_be(texts: list[str], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse_augmentations(texts)


@pytest.mark.filterwarnings("ignore")
def test_every_error_is_of_the_family() -> None:
    """A file of any content is an image, or a sentence."""
    random = np.random.default_rng(0)
    stream = io.BytesIO()
    Image.fromarray(pixels(1, 16, 16, 3)[0]).save(stream, "jpeg")
    for whole in (PNG, stream.getvalue(), encode(pixels(1, 9, 9, 3)[0], "gif"), encode(pixels(1, 9, 9, 3)[0], "tiff")):
        for _ in range(150):
            content = bytearray(whole)
            for place in random.integers(0, len(whole), 3):
                content[place] = random.integers(256)
            try:
                read_image(bytes(content[: random.integers(len(content) // 2, len(content) + 1)]), 3, True)
            except ConvGradError as error:
                assert str(error)  # noqa: PT017  # most are errors, some are images
