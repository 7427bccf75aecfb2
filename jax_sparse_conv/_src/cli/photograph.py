"""The photographs that commands run networks on, as a batch of uint8 images of a network's input size."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jax_sparse_conv._src.cli.errors import UserError, optional

SAMPLE = "china.jpg"
_SIXTEEN_BITS = ("PPM", "PNG")  # formats whose pixels of mode "I" are in 0..65535
# What Pillow's readers raise for broken files: all that 240,000 changed files of 20 formats raised with Pillow 13.
_UNREADABLE = (OSError, ValueError, SyntaxError, NotImplementedError)


def load(path: str | Path | None, size: int) -> np.ndarray:
    """A photograph, cropped to its central square and resized.

    Args:
      path: any file Pillow reads; None takes scikit-learn's sample photograph `china.jpg`.
      size: height and width of the result.

    Returns:
      uint8 [size, size, 3], RGB.

    Raises:
      UserError: the file is missing or no image, or Pillow or scikit-learn is not installed.
    """
    image_module = optional("PIL.Image", "Pillow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of many pixels and of odd notes in a file, which is read all the same
        image = image_module.fromarray(_sample()) if path is None else _open(image_module, Path(path))
        side = min(image.size)
        left, top = (image.size[0] - side) // 2, (image.size[1] - side) // 2
        square = image.crop((left, top, left + side, top + side))
        return np.asarray(square.resize((size, size), image_module.Resampling.BICUBIC), np.uint8)


def batch_of(image: np.ndarray, size: int) -> np.ndarray:
    """`size` different images made of one: itself, mirrored, then both shifted further and further.

    Image 2 i is shifted (rolled) by i steps of 7 rows and 13 columns, image 2 i + 1 is its mirror image.

    Args:
      image: [H, W, 3].
      size: number of images, at least 1.

    Returns:
      [size, H, W, 3], image 0 unchanged.
    """
    variants = []
    for index in range(size):
        step = index // 2
        shifted = np.roll(image, (7 * step, 13 * step), axis=(0, 1))
        variants.append(shifted[:, ::-1] if index % 2 else shifted)
    return np.stack(variants)


def _sample() -> Any:
    return optional("sklearn.datasets", "scikit-learn").load_sample_image(SAMPLE)


def _open(image_module: ModuleType, path: Path) -> Any:
    operations = optional("PIL.ImageOps", "Pillow")
    try:
        with image_module.open(path) as file:
            upright = operations.exif_transpose(file)  # as a camera has noted it
            return _in_colours(image_module, _eight_bits(image_module, upright, file.format, path))
    except FileNotFoundError as error:
        raise UserError(f"--image {path}: there is no such file") from error
    except image_module.DecompressionBombError as error:
        raise UserError(f"--image {path} has too many pixels to be read: {error}") from error
    except _UNREADABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--image {path} cannot be read as an image: {reason}") from error


def _eight_bits(image_module: ModuleType, image: Any, file_format: str | None, path: Path) -> Any:
    """An image of 16 bits in 8, which Pillow would cut off at 255 instead."""
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format in _SIXTEEN_BITS):
        return image_module.fromarray(((np.asarray(image, np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UserError(f"--image {path} has pixels of mode {image.mode!r}, whose range is not known; 8 or 16 bits are")
    return image


def _in_colours(image_module: ModuleType, image: Any) -> Any:
    """RGB; what is transparent lies on white, as viewers show it."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = image_module.new("RGBA", image.size, "white")
    return image_module.alpha_composite(white, image.convert("RGBA")).convert("RGB")
