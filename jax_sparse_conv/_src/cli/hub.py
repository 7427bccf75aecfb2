"""`--weights`: a file, or a repository of the Hugging Face hub, from which `huggingface_hub` brings and caches it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jax_sparse_conv._src.cli.errors import UserError, optional
from jax_sparse_conv.models.registry import Statistics

_WORD = "hub"
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_TORCHVISION_AT_TIMM = (
    *("vgg11", "vgg13", "vgg16", "vgg19", "vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn"),
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "densenet121", "densenet169", "densenet201"),
)
_REGNETS = {
    **{"regnetx_400mf": "004", "regnetx_600mf": "006", "regnetx_800mf": "008", "regnetx_1_6gf": "016"},
    **{"regnetx_3_2gf": "032", "regnetx_4gf": "040", "regnetx_6_4gf": "064", "regnetx_8gf": "080"},
    **{"regnetx_12gf": "120", "regnetx_16gf": "160", "regnetx_32gf": "320"},
}
REPOSITORIES = {
    **{name: f"timm/{name}.tv_in1k" for name in _TORCHVISION_AT_TIMM},
    **{name: f"timm/regnetx_{size}.pycls_in1k" for name, size in _REGNETS.items()},
}
"""By network the repository that `hub` alone means: weights of ImageNet in safetensors."""


@dataclasses.dataclass(frozen=True)
class Files:
    """Weights on this machine and what came with them.

    Attributes:
      labels: the classes' names by index, where the repository has them.
      statistics: mean and deviation of the pixels in 0..1 that the weights expect, where the repository says so.
      notes: sentences for the user.
    """

    path: Path
    labels: list[str] | None = None
    statistics: Statistics | None = None
    notes: tuple[str, ...] = ()


def files_of(weights: str, network: str) -> Files:
    """What `--weights` names.

    Args:
      weights: a file's path, "hub", or "hub:OWNER/NAME".
      network: whose weights "hub" is.

    Raises:
      UserError: no repository is known or reached, it has no safetensors file, or huggingface_hub is not installed.
    """
    word, colon, repository = weights.partition(":")
    if word != _WORD:
        return Files(Path(weights))
    if not colon:
        if network not in REPOSITORIES:
            raise UserError(
                f"--weights hub: no repository with weights of {network} is known, only of "
                f"{', '.join(sorted(REPOSITORIES))}; name one as hub:OWNER/NAME, or give a safetensors file"
            )
        repository = REPOSITORIES[network]
    path = _brought(repository, _WEIGHTS)
    config = _config(repository)
    labels = _labels(config)
    without = () if labels else (f"{repository} has no names of the classes; --labels takes a file of them.",)
    notes = (f"Weights of {repository}.", *without)
    return Files(path, labels, _statistics(config), notes)


def _brought(repository: str, name: str) -> Path:
    """A file of a repository, from the library's cache where it is there and up to date."""
    library = optional("huggingface_hub", "huggingface_hub", "hub")
    errors = optional("huggingface_hub.errors", "huggingface_hub", "hub")
    try:
        return Path(library.hf_hub_download(repository, name))
    except (errors.EntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--weights hub:{repository}: {name} cannot be had: {reason}") from error


def _config(repository: str) -> dict[str, Any]:
    path = _brought(repository, _CONFIG)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--weights hub:{repository}: {_CONFIG} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _labels(config: dict[str, Any]) -> list[str] | None:
    """timm's `label_names`, by index or as a list, described by `label_descriptions`; or the hub's `id2label`."""
    names = config.get("label_names") or config.get("id2label")
    if isinstance(names, dict):
        indices = sorted(int(index) for index in names if str(index).isdecimal())
        names = [names[str(index)] for index in indices] if indices == list(range(len(names))) else None
    if not isinstance(names, list):
        return None
    descriptions = config.get("label_descriptions")
    return [str(descriptions.get(name, name) if isinstance(descriptions, dict) else name) for name in names]


def _statistics(config: dict[str, Any]) -> Statistics | None:
    """`mean` and `std` of timm's `pretrained_cfg`."""
    settings = config.get("pretrained_cfg")
    if not isinstance(settings, dict):
        return None
    mean, deviation = settings.get("mean"), settings.get("std")
    if not (isinstance(mean, list) and isinstance(deviation, list) and len(mean) == len(deviation) == 3):
        return None
    return tuple(map(float, mean)), tuple(map(float, deviation))
