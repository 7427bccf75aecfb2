"""Photographs of every kind that Pillow reads, and files that are none: the right pixels, or one sentence."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_sparse_conv.__main__ import main
from jax_sparse_conv._src.cli import photograph

image_module = pytest.importorskip("PIL.Image")
SIZE = 32
GREY16 = np.linspace(0, 65535, SIZE * SIZE).reshape(SIZE, SIZE).astype(np.uint16)
RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (SIZE, SIZE, 3), np.uint8)


def loaded(path: Path, size: int = SIZE) -> np.ndarray:
    """Without a warning: they would be lines about Pillow's insides."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return photograph.load(path, size).astype(int)


def grey(values: Any) -> np.ndarray:
    return np.repeat(np.asarray(values, int)[..., None], 3, -1)


def pgm(values: np.ndarray, largest: int, magic: bytes = b"P5") -> bytes:
    head = b"%s\n%d %d\n%d\n" % (magic, values.shape[1], values.shape[0], largest)
    return head + values.astype(">u2" if largest > 255 else "u1").tobytes()


def png16(values: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel, [H, W, channels], which Pillow does not write itself."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    height, width, channels = values.shape
    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (pgm(GREY16, 65535), grey(GREY16 / 257)),
        (pgm(GREY16 // 64, 1023), grey((GREY16 // 64) / 1023 * 255)),
        (pgm(GREY16 // 257, 255), grey(GREY16 // 257)),
        (pgm(np.repeat(GREY16[..., None], 3, -1), 65535, b"P6"), grey(GREY16 / 257)),
        (png16(GREY16[..., None]), grey(GREY16 / 257)),
        (png16(np.stack([GREY16, GREY16[::-1], GREY16.T], -1)), np.stack([GREY16, GREY16[::-1], GREY16.T], -1) / 257),
        (png16(np.stack([GREY16, np.full_like(GREY16, 65535)], -1)), grey(GREY16 / 257)),
    ],
    ids=["pgm16", "pgm10", "pgm8", "ppm16", "png16", "png16_rgb", "png16_grey_alpha"],
)
def test_what_has_more_than_8_bits_is_scaled(content: bytes, expected: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(content)
    np.testing.assert_allclose(loaded(tmp_path / "image"), expected, atol=1.01)


def test_tiff_of_16_bits_in_both_orders_of_bytes(tmp_path: Path) -> None:
    for order in ("<", ">"):
        image = image_module.frombytes("I;16" if order == "<" else "I;16B", (SIZE, SIZE), GREY16.astype(f"{order}u2"))
        image.save(tmp_path / "16.tiff")
        np.testing.assert_allclose(loaded(tmp_path / "16.tiff"), grey(GREY16 / 257), atol=1)


def test_modes_of_8_bits_and_fewer(tmp_path: Path) -> None:
    image = image_module.fromarray(RGB)
    bits = RGB[..., 0] > 127
    palette = image.quantize(7)
    cmyk = np.concatenate([RGB, np.zeros_like(RGB[..., :1])], -1)
    for name, saved, expected in (
        ("rgb.png", image, RGB),
        ("grey.png", image_module.fromarray(RGB[..., 0]), grey(RGB[..., 0])),
        ("bits.png", image_module.fromarray(bits), grey(255 * bits)),
        ("bits.pbm", image_module.fromarray(bits), grey(255 * bits)),
        ("palette.gif", palette, np.asarray(palette.convert("RGB"))),
        ("cmyk.tiff", image_module.frombytes("CMYK", (SIZE, SIZE), cmyk.tobytes()), 255 - RGB),
    ):
        saved.save(tmp_path / name)
        np.testing.assert_array_equal(loaded(tmp_path / name), expected, name)


def test_what_is_transparent_lies_on_white(tmp_path: Path) -> None:
    alpha = RNG.integers(0, 256, (SIZE, SIZE, 1), np.uint8)
    image_module.fromarray(np.concatenate([RGB, alpha], -1)).save(tmp_path / "rgba.png")
    expected = RGB * (alpha / 255) + 255 * (1 - alpha / 255)
    np.testing.assert_allclose(loaded(tmp_path / "rgba.png"), expected, atol=1.01)
    palette = image_module.fromarray(RGB).quantize(5)
    palette.save(tmp_path / "palette.png", transparency=2)
    expected = np.where((np.asarray(palette) == 2)[..., None], 255, np.asarray(palette.convert("RGB")))
    np.testing.assert_array_equal(loaded(tmp_path / "palette.png"), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "I;16"])
def test_photographs_lie_as_the_camera_was_held(orientation: int, mode: str, tmp_path: Path) -> None:
    upright = np.zeros((SIZE, SIZE), np.uint16)
    upright[:8], upright[8:, :8] = 65535, 257 * 100
    turns = {3: 2, 4: 2, 5: 1, 6: 1, 7: 3, 8: 3}.get(orientation, 0)  # against the clock, of what was stored
    stored = np.rot90(upright[:, ::-1] if orientation in (2, 4, 5, 7) else upright, turns)
    if orientation == 5:
        stored = upright.T
    elif orientation == 7:
        stored = upright[::-1, ::-1].T
    elif orientation == 4:
        stored = upright[::-1]
    values = np.ascontiguousarray(stored)
    image = image_module.fromarray(values if mode == "I;16" else grey(values // 257).astype(np.uint8))
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(loaded(tmp_path / "turned.png"), grey(upright // 257))


def test_pixels_whose_range_is_not_known_are_refused(tmp_path: Path) -> None:
    for dtype, mode in ((np.float32, "F"), (np.int32, "I")):
        image_module.fromarray(GREY16.astype(dtype)).save(tmp_path / "wide.tiff")
        with pytest.raises(photograph.UserError, match=rf"wide\.tiff has pixels of mode '{mode}', whose range is not"):
            loaded(tmp_path / "wide.tiff")


def test_too_many_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_module.fromarray(RGB).save(tmp_path / "large.png")
    monkeypatch.setattr(image_module, "MAX_IMAGE_PIXELS", 800)  # Pillow warns of 1024, and refuses above 1600
    np.testing.assert_array_equal(loaded(tmp_path / "large.png"), RGB)
    monkeypatch.setattr(image_module, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(photograph.UserError, match=r"large\.png has too many pixels to be read: .*1024 pixels"):
        loaded(tmp_path / "large.png")


@pytest.mark.parametrize("command", [["run"], ["maps", "--out", "out"], ["calibrate", "--out", "plan.json"]])
def test_every_command_refuses_a_bomb_in_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bomb.png").write_bytes(png16(np.zeros((1, 1, 1))).replace(b"\0\0\0\1\0\0\0\1", b"\0\1\0\0\0\1\0\0", 1))
    assert main([*command, "--network", "lenet5", "--image", "bomb.png"]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("jax_sparse_conv: --image bomb.png ")
    assert "Traceback" not in captured.err


def broken_files() -> dict[str, bytes]:
    """Photographs in several formats, cut off and with bytes changed."""
    found = {"empty": b"", "text": b"no photograph"}
    for kind, content in (("PNG", RGB), ("JPEG", RGB), ("GIF", RGB), ("TIFF", RGB), ("BMP", RGB), ("WEBP", RGB)):
        file = io.BytesIO()
        image_module.fromarray(content).save(file, kind)
        whole = file.getvalue()
        found |= {f"{kind}_{part}": whole[: len(whole) * part // 8] for part in (1, 4, 7)}
        for seed in range(12):
            rng = np.random.default_rng(seed)
            changed = np.frombuffer(whole, np.uint8).copy()
            changed[rng.integers(0, min(len(changed), 200 if seed % 2 else 10**9), 8)] = rng.integers(0, 256, 8)
            found[f"{kind}_changed_{seed}"] = changed.tobytes()
    return found


def test_broken_files_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    refused = {}
    for name, content in broken_files().items():
        path = tmp_path / name
        path.write_bytes(content)
        try:
            assert loaded(path).shape == (SIZE, SIZE, 3)
        except photograph.UserError as error:
            refused[path] = str(error)
    assert len(refused) > 20
    for path, sentence in refused.items():
        assert sentence.startswith(f"--image {path} ")
        assert "\n" not in sentence
