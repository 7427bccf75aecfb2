"""Cases by which "direct" takes each of its tiles on a GPU: of small maps, of groups, and of two warpgroups."""

from __future__ import annotations

from cases import Case

# Layers of few results, for which the warps of a GPU's block share the reduction axis: tiles of 16 x 8, 16 x 16 and
# 32 x 16, each in all element types and precisions, with edges on every side; the last five of input or output channels
# that no 16 bytes divide.
SMALL_CASES = (
    Case("480->64 7x7, 1x1", (1, 7, 7, 480), 64, kernel=(1, 1), bias=True, activation="relu", zeros=0.3),
    Case("480->96 14x14, 1x1", (1, 14, 14, 480), 96, kernel=(1, 1), bias=True, residual=True, zeros=0.3),
    Case("480->192 14x14, 1x1", (1, 14, 14, 480), 192, kernel=(1, 1), activation="relu", zeros=0.3),
    Case("256->120 13x15, 1x1", (1, 13, 15, 256), 120, kernel=(1, 1), residual=True, activation="relu", zeros=0.3),
    Case("16->32 14x14", (1, 14, 14, 16), 32, bias=True, zeros=0.3),
    Case("24->72 14x13, 5x5", (1, 14, 13, 24), 72, kernel=(5, 5), activation="relu", zeros=0.3),
    Case("small, stride 2", (3, 15, 13, 48), 40, strides=2, bias=True, zeros=0.3),
    Case("small, dilation 2", (1, 13, 13, 32), 24, dilation=2, activation="relu", zeros=0.3),
    Case("small, groups", (2, 9, 9, 64), 96, groups=4, bias=True, zeros=0.3),
    Case("small, groups of 104 output channels", (3, 7, 9, 256), 208, groups=2, bias=True, residual=True, zeros=0.3),
    Case("small, one step", (1, 1, 1, 8), 8, kernel=(1, 1), bias=True, zeros=0.0),
    Case("small, half a step", (1, 5, 6, 24), 56, kernel=(1, 1), zeros=0.3),
    Case("small, wide and negative padding", (2, 6, 5, 16), 24, padding=((-1, 5), (4, -2)), bias=True, zeros=0.3),
    Case("LeNet", (2, 11, 11, 6), 16, kernel=(5, 5), padding="VALID", bias=True, activation="relu", zeros=0.3),
    Case("small, odd sizes", (2, 7, 9, 37), 41, bias=True, residual=True, activation="relu", zeros=0.3),
    Case("small, odd sizes, 1x1", (2, 5, 6, 37), 41, kernel=(1, 1), residual=True, zeros=0.3),
    Case("small, odd K", (1, 7, 7, 64), 50, kernel=(1, 1), bias=True, activation="relu", zeros=0.3),
    Case("small, odd sizes in groups", (1, 8, 7, 30), 33, groups=3, bias=True, zeros=0.3),
)

# For the kernel of images: both sizes of its tiles, pixels in pairs and one by one, edges on every side.
IMAGE_CASES = (
    Case("7x7 of two images, stride 2", (2, 32, 30, 3), 64, (7, 7), 2, 3, bias=True, activation="relu", zeros=0.0),
    Case("3x3 of an image", (1, 23, 21, 3), 72, bias=True, residual=True, zeros=0.0),
    Case("5x4 of four channels, stride (1, 2)", (1, 19, 33, 4), 100, kernel=(5, 4), strides=(1, 2), zeros=0.0),
)

# For the lists of ECR: groups of lanes of every size, blocks that share the channels, edges, groups.
ECR_CASES = (
    Case("lists of 256 channels", (1, 14, 13, 256), 136, bias=True, residual=True, activation="relu", zeros=0.6),
    Case("lists of two images, stride 2", (2, 15, 14, 192), 264, strides=2, bias=True, zeros=0.6),
    Case("lists of groups, 1x1", (3, 7, 9, 256), 272, kernel=(1, 1), groups=2, activation="relu", zeros=0.6),
)

# Small maps of more channels in float32: what `splitk_channels` is for, by each of its tiles, with edges.
SPLITK_CASES = (
    Case("192->384 7x7", (1, 7, 7, 192), 384, bias=True, activation="relu", zeros=0.3),
    Case("384->256 5x5", (1, 5, 5, 384), 256, residual=True, activation="relu", zeros=0.3),
    Case("832->160 7x7, 1x1", (1, 7, 7, 832), 160, kernel=(1, 1), bias=True, residual=True, zeros=0.3),
    Case("640->96 of three images, 1x1", (3, 7, 7, 640), 96, kernel=(1, 1), activation="relu", zeros=0.3),
    Case("832->64 28x28, 1x1", (1, 28, 28, 832), 64, kernel=(1, 1), bias=True, zeros=0.3),
    Case("split-K, stride 2", (2, 13, 15, 192), 72, strides=2, bias=True, zeros=0.3),
    Case("split-K, stride 2, 384", (1, 9, 9, 384), 384, strides=2, bias=True, zeros=0.3),
    Case("split-K, 1x1, stride 2", (1, 13, 14, 640), 96, kernel=(1, 1), strides=2, bias=True, zeros=0.3),
    Case("split-K, 1x3, stride (1, 2)", (1, 7, 15, 384), 96, kernel=(1, 3), strides=(1, 2), bias=True, zeros=0.3),
    Case("split-K, dilation 2", (1, 13, 13, 192), 60, dilation=2, activation="relu", zeros=0.3),
    Case("split-K, groups", (1, 9, 9, 512), 256, groups=2, bias=True, residual=True, zeros=0.3),
    Case("split-K, 5x5", (1, 7, 9, 192), 44, kernel=(5, 5), bias=True, zeros=0.3),
    Case("split-K, 104 channels", (1, 7, 7, 104), 40, bias=True, activation="relu", zeros=0.3),
    Case("split-K, negative padding", (2, 8, 7, 256), 100, padding=((-1, 3), (2, -2)), bias=True, zeros=0.3),
    Case("split-K, 14x13", (1, 14, 13, 320), 132, bias=True, activation="relu", zeros=0.3),
    Case("split-K, no zeros", (1, 7, 7, 96), 16, bias=True, zeros=0.0),
    Case("split-K, zeros alone", (1, 6, 6, 192), 384, bias=True, zeros=1.0),
    Case("832->48 7x7, 1x1", (1, 7, 7, 832), 48, kernel=(1, 1), bias=True, residual=True, zeros=0.3),
    Case("2048->256 7x7, 1x1", (1, 7, 7, 2048), 256, kernel=(1, 1), bias=True, activation="relu", zeros=0.3),
    Case("192->128 28x28, 1x1", (1, 28, 28, 192), 128, kernel=(1, 1), bias=True, activation="relu", zeros=0.3),
    Case("128->32 56x56", (1, 56, 56, 128), 32, bias=True, residual=True, activation="relu", zeros=0.3),
    Case("192->60 27x29, 1x1", (1, 27, 29, 192), 60, kernel=(1, 1), bias=True, residual=True, zeros=0.3),
    Case("1024->32 of eight images, stride 2", (8, 5, 5, 1024), 32, strides=2, bias=True, zeros=0.3),
)

# For the kernel of groups of few channels: tiles of part of an image and of several, groups that are no whole bundles,
# units of channels in odd numbers, several tiles of output channels.
GROUP_CASES = (
    Case("groups of 16", (8, 28, 28, 128), 128, groups=8, bias=True, activation="relu", zeros=0.3),
    Case("groups of 24, 27x29", (3, 27, 29, 120), 120, groups=5, bias=True, zeros=0.3),
    Case("groups of 8", (4, 28, 28, 72), 72, groups=9, activation="relu", zeros=0.3),
    Case("groups of 40 to 56", (8, 23, 24, 80), 112, groups=2, residual=True, activation="relu", zeros=0.3),
    Case("groups of 56 to 40", (8, 23, 24, 112), 80, groups=2, bias=True, residual=True, zeros=0.3),
    Case("groups of 24, stride 2", (8, 41, 42, 72), 72, groups=3, strides=2, bias=True, zeros=0.3),
    Case("groups of 64 to 32", (8, 23, 24, 128), 64, groups=2, bias=True, activation="relu", zeros=0.3),
    Case("groups of 48", (8, 23, 24, 96), 96, groups=2, bias=True, zeros=0.3),
    Case("groups of 24, 33 images of 7x7", (33, 7, 7, 144), 144, groups=6, activation="relu", zeros=0.3),
    Case("groups of 16, 1x1", (8, 28, 30, 96), 96, kernel=(1, 1), groups=6, bias=True, zeros=0.3),
    Case("groups of 16, 5x5", (8, 28, 29, 64), 64, kernel=(5, 5), groups=4, bias=True, zeros=0.3),
    Case("groups of 24, 5x2, stride (1, 3)", (8, 33, 60, 72), 72, (5, 2), (1, 3), groups=3, zeros=0.3),
    Case("groups of 16, dilation (2, 3)", (8, 33, 35, 48), 48, dilation=(2, 3), groups=3, bias=True, zeros=0.3),
    Case("groups of 16, negative padding", (8, 28, 27, 64), 64, padding=((-1, 3), (2, -2)), groups=4, zeros=0.3),
    Case("groups of 24, VALID", (8, 21, 22, 96), 96, padding="VALID", groups=4, bias=True, zeros=0.3),
    Case("groups of 16, no zeros", (8, 28, 28, 64), 64, groups=4, bias=True, zeros=0.0),
    Case("groups of 16, zeros alone", (8, 28, 28, 64), 64, groups=4, bias=True, zeros=1.0),
    Case("groups of 24, weights of one sign", (8, 23, 24, 48), 48, groups=2, zeros=0.3, one_sign=True),
)

# Whose blocks have two consumer warpgroups in TF32 on 132 SMs: one or two blocks of a tile and several that send sums
# to DSMEM slots, up to 16; in patches and in pixels in a row.
TF32_WARPGROUP_CASES = (
    Case("one block of a tile", (1, 23, 55, 128), 400, residual=True, activation="relu"),
    Case("one block, pooled", (1, 20, 55, 128), 400, bias=True, activation="relu", pool="max"),
    Case("two blocks of a tile", (1, 56, 11, 256), 400, bias=True, residual=True),
    Case("two blocks, pooled", (1, 8, 55, 256), 400, activation="relu", pool="max"),
    Case("eight blocks of a tile", (1, 8, 8, 1024), 512, bias=True, residual=True, activation="relu"),
    Case("eight blocks, pooled", (1, 8, 6, 1024), 512, bias=True, activation="relu", pool="avg"),
    Case("eight blocks, of whom one has a step less", (1, 8, 8, 1504), 512, bias=True),
    Case("four blocks, slots in place", (2, 14, 14, 72), 432, kernel=(7, 7), bias=True, residual=True),
    Case("eight blocks, stride 2", (1, 28, 28, 1024), 256, strides=2, bias=True, activation="relu"),
    Case("sixteen blocks, slots in place, pooled", (1, 14, 7, 984), 416, kernel=(7, 7), bias=True, pool="avg"),
    Case("sixteen blocks of a tile", (1, 8, 8, 2016), 200, bias=True, activation="relu"),
    Case("sixteen blocks, pooled", (1, 8, 6, 2016), 32, bias=True, pool="max"),
    Case("one block, pixels in a row", (5, 28, 55, 1504), 32, kernel=(1, 1), bias=True, activation="relu"),
    Case("eight blocks, pixels in a row", (1, 7, 28, 1504), 200, residual=True),
    Case("sixteen blocks, pixels in a row", (1, 7, 11, 2016), 200, bias=True, activation="relu"),
)

# Layers of so little work that blocks share the channels of a tile: patches and pixels, of 56 and 112, pooled.
SHARED_TILES = (
    Case("patches", (1, 14, 14, 192), 192, bias=True, residual=True, activation="relu", zeros=0.5),
    Case("a patch", (1, 7, 7, 512), 136, bias=True, zeros=0.5),
    Case("pixels", (1, 14, 13, 512), 200, kernel=(1, 1), residual=True, activation="relu", zeros=0.5),
    Case("pooled patches", (1, 14, 14, 384), 512, bias=True, activation="relu", pool="max", zeros=0.5),
    Case("a high pooled map", (1, 66, 64, 128), 64, bias=True, activation="relu", pool="max", zeros=0.5),
    Case("a narrow pooled map", (1, 128, 8, 256), 64, activation="relu", pool="avg", zeros=0.5),
)
