"""The claims of the sources, one number each, with what is compared with what here and why the numbers differ."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from benchmarks.paper import answers, zeros
from benchmarks.paper.answers import Answer
from benchmarks.paper.cusnn import density


@dataclasses.dataclass(frozen=True)
class Claim:
    """One number of a paper.

    Attributes:
      number: our number for it: source, section or figure, and a letter.
      text: what is claimed.
      theirs: the paper's number.
      experiment: name of the experiment that answers it; a result file of that name in paper/ and in paper/cpu/.
      ours: from the file's content to our number, as text.
      baseline: what ours is compared with.
      why: a sentence on why the two differ.
      is_count: whether it is counted, so that the machine does not matter.
    """

    number: str
    text: str
    theirs: str
    experiment: str
    ours: Answer
    baseline: str
    why: str
    is_count: bool = False


_BOTH = "XLA, HIGHEST and default"
_HIGHEST = "XLA, HIGHEST"
_CUSPARSE = "im2col, DenseToSparse and SpMM of cuSPARSE"
_OWN = "our own kernel"
_AUTO = ("auto", "auto default")

_CODE = "https://github.com/milk2we/conv_pool_algorithm/blob/dcf5cbd/ECR"  # which the 2019 paper names
_ONE_CHANNEL = (
    f"The code published in 2019 times one channel with one filter, and cudaMalloc and copies count on both sides "
    f"([ecr.cu]({_CODE}/ouralgorithm/ecr.cu), [cudnn.cu]({_CODE}/cudnn/cudnn.cu)); these are the real multi-channel "
    "layers with all memory allocated."
)
_POOL_OF_2019 = (
    "The paper's baseline moves the map to the host before it pools "
    f"([cudnn.cu]({_CODE.removesuffix('/ECR')}/PECR/cudnn/cudnn.cu)); XLA's pool runs on the GPU."
)
_TENSOR_CORES = f"{_ONE_CHANNEL} The paper's Tensor Core GEMM is what default is here: TF32."
_CUSNN_CODE = "https://github.com/aGoodCat/PACT-CUSNN/blob/75c5f37"  # which the paper names
_CUDNN_OF_CUSNN = f"{_CUSNN_CODE}/2080Ti/end2end-model-eval/resnet50/src/Conv.cu"
_IMAGES_OF_CUSNN = "https://github.com/aGoodCat/PACT-CUSNN/tree/75c5f37/sample_images"
_FIXED_ALGORITHM = (
    f"cuSNN's baseline fixes one cuDNN algorithm ([Conv.cu]({_CUDNN_OF_CUSNN})), and its maps come from "
    f"[images]({_IMAGES_OF_CUSNN}) that are padded and not normalised; XLA picks the fastest algorithm, on a newer "
    "cuDNN and GPU."
)
_WHOLE = "Fully connected layers and pools count too; default is TF32, against which float32 kernels lose large maps."
_STEPS = "Here cuSPARSE's steps share one jit and are given the matrix's capacity; the paper's do not."
_SUMS = (
    "Not run as whole networks: sums over the layers, each on its own map and as often as the network has it. Pools, "
    "fully connected layers and, for RegNetX-16GF, grouped ones are left out, which the paper's ratios include."
)
_MODEL = (
    "The model has eq. (4) the right way up and is fed by the device's own properties. It departs from the paper in "
    "three ways: occupancy counts against half of the best that any configuration reaches, because sums in registers "
    "keep all of them under half of what a multiprocessor holds; two thirds of the configurations stay instead of the "
    "third that moves least data; and the time is fitted to an H200, with what a wave does beside its multiply-adds."
)
_BOUND = "Here an upper bound: the time with a map of zeros, fixed costs of a call included."
_KERNEL = "What is left is not from zeros."

_ALGORITHMS = (
    "cuDNN's side is the convolution alone, in float32, without bias, ReLU and pool, which ours has. The two bars have "
    "no number in the paper. A layer is missing where cuDNN has no such algorithm for it today."
)
_MATRIX = (
    "Only windows that reach over the edge add zeros. Without padding the matrix has about as many as the map. The "
    "zeros are of a network with seeded weights and a trained network's zeros."
)
_FORMAT = (
    "ECR has a value and an index for each element of a window, twice im2col's bytes. Only memory for the non-zeros "
    "alone is less, and that takes more than 50 % zeros."
)
_PROFILE = (
    "DenseNet-201 and ResNet-152 have the zeros of DenseNet-169 and ResNet-50, block by block. The maps of trained "
    "networks are six 3x3 layers' of those two."
)
_ONE_CONFIGURATION = "COO* of one configuration"
_BY_DENSITY = (
    "The paper gives no time for this. Here all kernels of a call are launched, and those of other densities return at "
    "once. Maps have independent zeros."
)
_STORED = (
    "The paper's times contain the conversion. Here the kernel makes its lists on the way; stored ones are for several "
    "layers that read one map. Maps have independent zeros."
)
_SHARES = (
    "Each kind of layer is timed by itself. The 1x1 layers count here, and of a DenseNet they read maps with fewer "
    "zeros; the row below leaves them out, as Fig. 2 of the paper does."
)

_OCPA_NETWORKS = (
    ("vgg19", "VGG-19", "3.91x; Tensor Core GEMM 2.97x", "1.97x", "3.28x"),
    ("resnet50", "ResNet-50", "3.53x; Tensor Core GEMM 2.44x", "2.23x", "3.3x"),
    ("densenet121", "DenseNet-121", "3.48x; Tensor Core GEMM 3.74x", "2.74x", "3.13x"),
    ("regnetx_16gf", "RegNetX-16GF", "2.79x; Tensor Core GEMM 3.30x", "1.58x", "2.49x"),
)
_OVER_GEMM = ("4.14x", "3.73x", "3.79x", "2.96x")
_NAMES = tuple(name for name, *_ in _OCPA_NETWORKS)


def claims() -> list[Claim]:
    """All of them, in the order of the document."""
    return [*_ocpa_claims(), *_sensitivity_claims(), *_claims_of_2019(), *_cusnn_claims()]


def _ocpa_claims() -> Iterator[Claim]:
    text, theirs = (
        "Fig. 2: zeros of a map and of its im2col matrix, VGG-19",
        "over 70 % in deep layers; the matrix more",
    )
    yield Claim("O2", text, theirs, "fig2", zeros.zeros_of_matrices, "none, a count", _MATRIX, is_count=True)
    text, theirs = "Fig. 3: moving maps in the time of VGG-19's layers", "considerable, most in the first layers"
    why = "The paper's networks pool on the host, so that maps cross; in no other row here does one."
    yield Claim("O3t", text, theirs, "fig3", answers.transfers, "XLA, and copies of pageable memory", why)
    ours = answers.over_xla(("ecr", "coo", *_AUTO), answers.is_own, spread=True)
    text = "Table 3: ECR over cuDNN FAST, 14 layers"
    yield Claim("O3", text, "2.24x to 2.78x", "table3", ours, _BOTH, _ONE_CHANNEL)
    ours = answers.over_xla(("ecr", "coo"), answers.has_no_zeros)
    yield Claim("O3a", "Table 3's layers with 0 % zeros", "-", "table3", ours, _BOTH, _KERNEL)
    ours = answers.over_cusparse(answers.is_table3)
    yield Claim("O3b", "Table 3: ECR over cuSPARSE", "2.97x to 3.99x", "fig10", ours, _CUSPARSE, _STEPS)
    sides = ("ocpa", *_AUTO)
    for letter, (name, title, theirs, _, _) in zip("abcd", _OCPA_NETWORKS, strict=True):
        ours = answers.over_xla(sides, answers.of_network(name))
        text = f"Fig. 9: layers of {title} over cuDNN FAST"
        yield Claim(f"O9{letter}", text, theirs, "fig9", ours, _BOTH, _TENSOR_CORES)
    for letter, (name, title, *_), over in zip("abcd", _OCPA_NETWORKS, _OVER_GEMM, strict=True):
        text = f"Fig. 9: layers of {title} over cuDNN's other algorithms"
        theirs = f"GEMM {over}; IMPLICIT_GEMM and FFT_TILING are bars"
        ours = answers.over_algorithms(name)
        yield Claim(f"O9{letter}g", text, theirs, "fig9_algorithms", ours, "cuDNN, told which", _ALGORITHMS)
    for letter, (name, title, _, theirs, _) in zip("abcd", _OCPA_NETWORKS, strict=True):
        ours = answers.over_xla(sides, answers.of_network(name))
        text = f"whole {title} over cuDNN FAST"
        yield Claim(f"O8.2{letter}", text, theirs, "networks", ours, _BOTH, _WHOLE)
    for letter, (name, title, _, _, theirs) in zip("abcd", _OCPA_NETWORKS, strict=True):
        ours = answers.over_cusparse(answers.of_network(name))
        text = f"Fig. 10: layers of {title} over cuSPARSE"
        grouped = " Grouped layers are not one SpMM and are left out." if name == "regnetx_16gf" else ""
        yield Claim(f"O10{letter}", text, theirs, "fig10", ours, _CUSPARSE, _STEPS + grouped)
    theirs = "2.10x VGG-19, 1.83x ResNet-50, 2.35x DenseNet-121, 1.35x RegNetX-16GF"
    text, ours = "section 8.2.2: whole networks over cuSPARSE", answers.sums_over_cusparse(_NAMES)
    yield Claim("O10w", text, theirs, "fig10", ours, _CUSPARSE, _SUMS)


def _sensitivity_claims() -> Iterator[Claim]:
    why = "Same direction: XLA's time does not depend on zeros; a part of ours does not either (O14)."
    for letter, op, side in (("a", "conv", "ecr"), ("b", "conv_pool", "pecr")):
        ours = answers.each(side, answers.all_of(answers.op(op), answers.source("iid")), "zeros_target")
        text = f"Fig. 11{letter}: {side.upper()}'s speed-up by % zeros"
        yield Claim(f"O11{letter}", text, "rises with sparsity", "fig11", ours, _HIGHEST, why)
    why = "A large batch fills the GPU for cuDNN too. " + _ONE_CHANNEL
    for letter, op, side, theirs in (
        ("a", "conv", "ecr", "~1.5x at 128"),
        ("b", "conv_pool", "pecr", "over 6x at 128"),
    ):
        ours = answers.each(side, answers.all_of(answers.op(op), answers.is_own), "batch")
        text = f"Fig. 12{letter}: {side.upper()}'s speed-up by batch"
        yield Claim(f"O12{letter}", text, theirs, "fig12", ours, _HIGHEST, why)
    ours = answers.each("ecr", answers.is_own, "strides")
    text = "Fig. 13: VGG-19 with strides 1, 2, 3"
    yield Claim("O13", text, "2.51x, 2.70x, 2.83x", "fig13", ours, _HIGHEST, _ONE_CHANNEL)
    for letter, op, side, theirs, names in (
        ("a", "conv", "ecr", "34 % DenseNet, 47 % RegNet, 30 % ResNet, 17 % VGG", _NAMES),
        ("b", "conv_pool", "pecr", "50 % DenseNet, 39 % ResNet, 14 % VGG", _NAMES[:3]),
    ):
        text = f"Fig. 14{letter}: conversion in {side.upper()}'s time"
        yield Claim(f"O14{letter}", text, theirs, "fig14", answers.empty_share(op), _OWN, _BOUND)
        ours = answers.empty_share_of_networks(side, op, names)
        yield Claim(f"O14{letter}n", f"{text}, all layers", theirs, "fig9", ours, _OWN, _BOUND)


def _claims_of_2019() -> Iterator[Claim]:
    vgg = answers.of_network("vgg19")
    theirs = "3.5x (GTX 1080), 2x (RTX 2080)"
    ours = answers.over_xla(("ecr",), answers.all_of(vgg, answers.op("conv")))
    text = "2019: ECR over cuDNN FAST, layers of VGG-19"
    yield Claim("O19a", text, theirs, "fig9", ours, _BOTH, _ONE_CHANNEL)
    theirs = "4.1x (GTX 1080), 4.3x (RTX 2080)"
    ours = answers.over_xla(("pecr",), answers.all_of(vgg, answers.op("conv_pool")))
    text = "2019: PECR over cuDNN FAST, layers of VGG-19"
    yield Claim("O19b", text, theirs, "fig9", ours, f"{_BOTH}, with its pool", _POOL_OF_2019)
    yield from _peaks_of_2019()
    ours = answers.each("ecr", answers.is_own, "strides")
    yield Claim("O19c", "2019: strides 2 and 3", "1.8x, 1.75x", "fig13", ours, _HIGHEST, _ONE_CHANNEL)
    theirs = "35 % less than cuDNN, 17 % less than im2col"
    why = "The kernels hold their lists in shared memory; what they take is room for partial sums."
    baseline = "im2col's matrix, and XLA's workspace beside it"
    yield Claim("O19m", "2019: memory, VGG-19", theirs, "memory", answers.workspace, baseline, why)
    text, theirs = "2019: ECR's own memory, VGG-19", "17 % less than im2col"
    yield Claim("O19f", text, theirs, "fig2", zeros.format_bytes, "im2col's matrix", _FORMAT, is_count=True)
    text, theirs = "2019: converting against im2col, deep layers", "40 % faster"
    why = "Ours is a whole call on a map of zeros, whose fixed costs alone exceed a copy of such a map."
    yield Claim("O19i", text, theirs, "fig10", answers.conversion_over_im2col, "im2col alone", why)
    text = "2019: speed-up grows with sparsity / size"
    yield Claim("O19s", text, "grows", "size", answers.by_theta, _HIGHEST, _ONE_CHANNEL)


def _peaks_of_2019() -> Iterator[Claim]:
    vgg = answers.of_network("vgg19")
    theirs = "2.9x (first version), 6.7x (GTX 1080), 2.9x (RTX 2080)"
    text, ours = "2019: ECR's best layer of VGG-19", answers.peak("ecr", answers.all_of(vgg, answers.op("conv")))
    yield Claim("O19ap", text, theirs, "fig9", ours, _BOTH, _ONE_CHANNEL)
    theirs = "5.4x (GTX 1080), 8.1x (RTX 2080)"
    text, ours = "2019: PECR's best layer of VGG-19", answers.peak("pecr", answers.all_of(vgg, answers.op("conv_pool")))
    yield Claim("O19bp", text, theirs, "fig9", ours, f"{_BOTH}, with its pool", _POOL_OF_2019)
    text, theirs = "2019: Table I, ECR over cuDNN FAST, 10 layers", "1.54x to 3.57x"
    ours = answers.over_xla(("ecr",), answers.all_of(answers.is_own, answers.is_table_of_2019), spread=True)
    yield Claim("O19t", text, theirs, "table3", ours, _BOTH, _ONE_CHANNEL)
    text, ours = "2019: whole VGG-19 over cuDNN", answers.over_xla(("ocpa", *_AUTO), vgg)
    why = "The paper has ECR alone and does not say whether fully connected layers count; here they do."
    yield Claim("O19w", text, "2.3x", "networks", ours, _BOTH, why)


def _cusnn_claims() -> Iterator[Claim]:
    text, theirs = "Fig. 2: zeros of maps, layers beyond 1x1", "over 50 % in most layers, often over 75 %"
    yield Claim("C2", text, theirs, "cusnn_fig2", zeros.layers_by_zeros, "none, a count", _PROFILE, is_count=True)
    text, theirs = "Fig. 3: dense time by the zeros of layers", "under 50 %: a small share, least for DenseNet"
    yield Claim("C3", text, theirs, "cusnn_fig3", answers.time_by_zeros("percent"), "none, XLA alone", _SHARES)
    text, ours = "the same of layers beyond 1x1", answers.time_by_zeros("beyond_1x1_percent")
    yield Claim("C3b", text, theirs, "cusnn_fig3", ours, "none, XLA alone", "In percent of these layers' time.")
    why = "The paper leaves out each tile's count and what tiles hold beyond the map."
    memory = ("C34m", "section 3.4: COO*'s memory", "1.25x", "cusnn_fig2", zeros.coo_star_bytes)
    yield Claim(*memory, "dense maps", why, is_count=True)
    text = "section 3.4: the micro-kernel against plain loops"
    why = "Both share lists, weights and stores; only the sums of the plain loops are in local memory."
    yield Claim("C34", text, "2x to 4x", "cusnn_microkernel", answers.micro_kernel, "the same kernel, plain loops", why)
    text, theirs = "sections 3.2, 3.4: one of several micro-kernels, by density", "code for 11 sparsities"
    yield Claim("C34d", text, theirs, "cusnn_density", density.by_density, _ONE_CONFIGURATION, _BY_DENSITY)
    text = "section 3.4: stored lists against lists that the kernel makes"
    yield Claim("C34l", text, "-", "cusnn_density", density.stored_lists, _ONE_CONFIGURATION, _STORED)
    text, ours = "Fig. 8: loss of the model's choice, offline search", answers.median_loss("offline_loss")
    yield Claim("C8", text, "better or comparable", "cusnn_fig8", ours, "the configuration best on average", _MODEL)
    text, ours = "Fig. 9: loss of the model's choice, oracle", answers.median_loss("model_loss")
    yield Claim("C9", text, "low for most layers", "cusnn_fig9", ours, "the best configuration of each map", _MODEL)
    for letter, family, theirs in (("a", "DenseNet", "3.11x (V100), 3.23x"), ("b", "ResNet", "2.83x (V100), 3.5x")):
        ours = answers.over_xla(
            ("coo", "ecr", *_AUTO), answers.all_of(answers.starts(family), answers.source("real")), spread=True
        )
        text = f"Fig. 10{letter}: 3x3 layers of {family} over cuDNN, real maps"
        yield Claim(f"C10{letter}", text, theirs, "cusnn_fig10", ours, _BOTH, _FIXED_ALGORITHM)
        ours = answers.over_xla(("coo", "ecr"), answers.all_of(answers.starts(family), answers.has_no_zeros))
        text, why = f"the same layers with 0 % zeros, {family}", "What is left is the kernel's schedule on small maps."
        yield Claim(f"C10{letter}0", text, "-", "cusnn_fig10", ours, _BOTH, why)
    for letter, family in (("a", "DenseNet"), ("b", "ResNet")):
        ours = answers.each("coo", answers.all_of(answers.starts(family), answers.is_own), "batch")
        text = f"Fig. 11{letter}: {family} by batch"
        yield Claim(f"C11{letter}", text, "a plot", "cusnn_fig11", ours, _HIGHEST, _FIXED_ALGORITHM)
    families = (
        ("a", ("densenet169", "densenet201"), "DenseNet", "1.23x (V100), 1.24x"),
        ("b", ("resnet50", "resnet152"), "ResNet", "1.3x (V100), 1.26x"),
        ("c", ("vgg16", "vgg19"), "VGG", "1.12x (V100), 1.2x"),
    )
    for letter, names, family, theirs in families:
        ours = answers.over_xla(
            ("coo", "auto"),
            answers.all_of(_in(names), answers.source("profile")),
        )
        text = f"Fig. 12: whole {family}s"
        yield Claim(f"C12{letter}", text, theirs, "cusnn_fig12", ours, _BOTH, _FIXED_ALGORITHM)
        theirs = {"a": "1.18x (V100), 1.32x", "b": "1.32x (V100), 1.26x", "c": "1.18x (V100), 1.27x"}[letter]
        text, ours = (
            f"Fig. 12 with tiles by offline search: whole {family}s",
            answers.over_xla(("coo", "coo searched"), _in(names)),
        )
        yield Claim(f"C12{letter}s", text, theirs, "cusnn_search", ours, _BOTH, _FIXED_ALGORITHM)
        ours = answers.over_xla(
            ("coo", "auto"),
            answers.all_of(_in(names), answers.source("no zeros")),
        )
        yield Claim(f"C12{letter}0", f"the same {family}s without zeros", "-", "cusnn_fig12", ours, _BOTH, _KERNEL)
    why = (
        "Energy of the whole board over a loop of calls; most of what is saved is time, so that the sentence on the "
        "baseline of Fig. 12 holds here too."
    )
    yield Claim("C13", "Fig. 13: energy against cuDNN", "19 % less", "cusnn_fig13", answers.energy, _BOTH, why)
    ours = functools.partial(answers.energy, zeros=False)
    yield Claim("C130", "the same networks without zeros", "-", "cusnn_fig13", ours, _BOTH, _KERNEL)


def _in(names: tuple[str, ...]) -> answers.Keep:
    return lambda row: row["layer"] in names


# --- Cheng et al. ----------------------------------------------------------------------------------------------------

CHENG = {
    "14": (
        "the same kernel with its sums in local memory",
        "Same direction: caches hold local memory today, but each multiply-add still waits for its sum to come and go.",
    ),
    "20": (
        "D14's kernel, by outer products",
        "The gain is the paper's unit. Without one, an inner product is a chain of multiply-adds that wait for each "
        "other, each of which reads two values from shared memory.",
    ),
    "24": (
        "the same tiles by FFMA",
        "Tensor cores are such a unit, in TF32 instead of float32. On the paper's layer, 7 us in all, most of the time "
        "is a launch and the first copies.",
    ),
    "28": (
        "D14's kernel",
        "The same on ResNet-50's layer; on the paper's the fixed costs of a launch are half of the time.",
    ),
    "31": ("D28's kernel", "A check is four instructions beside an asynchronous copy, which hides them today."),
    "34": (
        "D31's kernel",
        "The paper's converter is hardware beside the multipliers; here the table is one more trip to shared memory.",
    ),
    "0": (
        "the kernel of D14's baseline",
        "The abstract's number has the units for inner products and for indices, which no GPU has.",
    ),
    "0t": (
        "the kernel of D14's baseline",
        "Tensor cores in the place of the unit for outer products, in TF32; no GPU has the other two units.",
    ),
}
"""By figure: what the technique is compared with here, a dense kernel as well, and why the effects differ."""

CHENG_PRINTED = "Of the 1024 taps of a filter of 32x32 at most 30 lie on a 5x6 image."
"""Why the layer that Table 1 prints is odd."""

_SHARES_OF_CYCLES = "By the clock of each warp, waiting for the block included; the paper's are of a simulator."
_NO_LATENCIES = (
    "No counter gives a GPU's latency by instruction; the memory that a thread keeps its sums in says as much."
)
CHENG_PARTS = (
    ("D8", "Fig. 8: computing in the baseline's time", "97 %", "local sums", "compute_percent", _SHARES_OF_CYCLES),
    (
        *("D9", "Fig. 9: local memory of a thread", "26 M cycles a load of a sum, 0.09 M of a pixel", "local sums"),
        *("local_bytes", _NO_LATENCIES),
    ),
    ("D13", "Fig. 13: the same, unrolled", "none left", "outer products", "local_bytes", _NO_LATENCIES),
    ("D14c", "Fig. 14: computing, unrolled", "69 %", "outer products", "compute_percent", _SHARES_OF_CYCLES),
    (
        *("D25", "Fig. 25: loading, the bottleneck at last", "a bar, with the units", "outer products", "load_percent"),
        "Without the units: loading is what unrolling leaves beside computing.",
    ),
)
"""Where the time of the paper's kernel goes: number, what, the paper's, the kernel's engine, the key of rows, why."""
