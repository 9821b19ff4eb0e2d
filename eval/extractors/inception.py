"""The network of the Fréchet Inception Distance (Heusel et al. 2017): the TensorFlow graph "inception-2015-12-05".

It is *not* torchvision's ``inception_v3``: other weights (1008 outputs), average pools that leave the padding out of
the mean, a max-pool in the last block, TensorFlow 1's bilinear resize inside the network. Parameters bear torchvision's
names, as in the published port ``pt_inception-2015-12-05-6726825d.pth``.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eval.extractors.observation import Observation
from eval.extractors.resize import bicubic, tensorflow1_bilinear

RESIZES = {"tf1-bilinear-299": tensorflow1_bilinear, "bicubic-antialias-299": bicubic}
"""The graph's own resize (protocols of ADM, EDM and torch-fidelity; the default), and clean-fid's before the graph."""

Size = int | tuple[int, int]  # one side, or height and width


class Conv(nn.Module):
    """Convolution without bias, batch norm with eps 1e-3, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: Size = 1, stride: int = 1, padding: Size = 0):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] to [N, outputs, H', W']."""
        return F.relu(self.bn(self.conv(x)))


def _row(inputs: int, outputs: int, length: int) -> Conv:
    return Conv(inputs, outputs, (1, length), padding=(0, length // 2))


def _column(inputs: int, outputs: int, length: int) -> Conv:
    return Conv(inputs, outputs, (length, 1), padding=(length // 2, 0))


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class BlockA(nn.Module):
    """35x35 grid: 1x1, 5x5, double 3x3 and pooled branches."""

    def __init__(self, inputs: int, pooled: int):
        super().__init__()
        self.branch1x1 = Conv(inputs, 64)
        self.branch5x5_1 = Conv(inputs, 48)
        self.branch5x5_2 = Conv(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = Conv(inputs, 64)
        self.branch3x3dbl_2 = Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, padding=1)
        self.branch_pool = Conv(inputs, pooled)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, 35, 35] to [N, 224 + pooled, 35, 35]."""
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat((self.branch1x1(x), five, three, self.branch_pool(_average(x))), 1)


class BlockB(nn.Module):
    """35x35 to 17x17."""

    def __init__(self, inputs: int):
        super().__init__()
        self.branch3x3 = Conv(inputs, 384, 3, stride=2)
        self.branch3x3dbl_1 = Conv(inputs, 64)
        self.branch3x3dbl_2 = Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, 35, 35] to [N, 480 + inputs, 17, 17]."""
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat((self.branch3x3(x), three, F.max_pool2d(x, 3, stride=2)), 1)


class BlockC(nn.Module):
    """17x17 grid: 7x7 convolutions as rows and columns."""

    def __init__(self, inputs: int, inner: int):
        super().__init__()
        self.branch1x1 = Conv(inputs, 192)
        self.branch7x7_1 = Conv(inputs, inner)
        self.branch7x7_2 = _row(inner, inner, 7)
        self.branch7x7_3 = _column(inner, 192, 7)
        self.branch7x7dbl_1 = Conv(inputs, inner)
        self.branch7x7dbl_2 = _column(inner, inner, 7)
        self.branch7x7dbl_3 = _row(inner, inner, 7)
        self.branch7x7dbl_4 = _column(inner, inner, 7)
        self.branch7x7dbl_5 = _row(inner, 192, 7)
        self.branch_pool = Conv(inputs, 192)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, 17, 17] to [N, 768, 17, 17]."""
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat((self.branch1x1(x), seven, double, self.branch_pool(_average(x))), 1)


class BlockD(nn.Module):
    """17x17 to 8x8."""

    def __init__(self, inputs: int):
        super().__init__()
        self.branch3x3_1 = Conv(inputs, 192)
        self.branch3x3_2 = Conv(192, 320, 3, stride=2)
        self.branch7x7x3_1 = Conv(inputs, 192)
        self.branch7x7x3_2 = _row(192, 192, 7)
        self.branch7x7x3_3 = _column(192, 192, 7)
        self.branch7x7x3_4 = Conv(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, 17, 17] to [N, 512 + inputs, 8, 8]."""
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat((three, seven, F.max_pool2d(x, 3, stride=2)), 1)


class BlockE(nn.Module):
    """8x8 grid with 3x3 convolutions split in two. ``last`` takes a maximum where the other block averages."""

    def __init__(self, inputs: int, last: bool):
        super().__init__()
        self.last = last
        self.branch1x1 = Conv(inputs, 320)
        self.branch3x3_1 = Conv(inputs, 384)
        self.branch3x3_2a = _row(384, 384, 3)
        self.branch3x3_2b = _column(384, 384, 3)
        self.branch3x3dbl_1 = Conv(inputs, 448)
        self.branch3x3dbl_2 = Conv(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = _row(384, 384, 3)
        self.branch3x3dbl_3b = _column(384, 384, 3)
        self.branch_pool = Conv(inputs, 192)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, 8, 8] to [N, 2048, 8, 8]."""
        three = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.last else _average(x)
        branches = (
            self.branch1x1(x),
            self.branch3x3_2a(three),
            self.branch3x3_2b(three),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(pooled),
        )
        return torch.cat(branches, 1)


class FIDInception(nn.Module):
    """Images of any size go to 2048 features, the mean over the last 8x8 grid ("pool_3").

    Args:
        resize: how images come to 299x299, a key of ``RESIZES``.
    """

    num_features = 2048
    num_spatial = 17 * 17 * 7
    num_classes = 1008
    image_shape = (3, None, None)

    def __init__(self, resize: str = "tf1-bilinear-299"):
        super().__init__()
        self.resize = resize
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = Conv(64, 80)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3)
        self.Mixed_5b = BlockA(192, 32)
        self.Mixed_5c = BlockA(256, 64)
        self.Mixed_5d = BlockA(288, 64)
        self.Mixed_6a = BlockB(288)
        self.Mixed_6b = BlockC(768, 128)
        self.Mixed_6c = BlockC(768, 160)
        self.Mixed_6d = BlockC(768, 160)
        self.Mixed_6e = BlockC(768, 192)
        self.Mixed_7a = BlockD(768)
        self.Mixed_7b = BlockE(1280, last=False)
        self.Mixed_7c = BlockE(2048, last=True)
        self.fc = nn.Linear(self.num_features, self.num_classes, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features [N, 2048] of fp32 pixels [N, 3, H, W] in 0..255."""
        return self._pool(self._grid(pixels))

    def observe(self, pixels: Tensor) -> Observation:
        """Features [N, 2048], spatial features [N, 2023] and bias-free logits [N, 1008] in one pass.

        The spatial features are those of ADM's sFID (Nash et al. 2021): 7 channels of TensorFlow's "mixed_6/conv:0",
        which is the ReLU after the 1x1 convolution of ``Mixed_6d``, hence the first channels of that block. They are
        flattened as height, width, channel, TensorFlow's order: a covariance in another order is another matrix, and
        sFID between the two reaches hundreds.
        """
        grid = self._grid(pixels)
        features = self._pool(grid)
        return Observation(features, grid[:, :7].permute(0, 2, 3, 1).flatten(1), self.fc(features))

    def _grid(self, pixels: Tensor) -> Tensor:
        """[N, 768, 17, 17] after ``Mixed_6d``."""
        x = (RESIZES[self.resize](pixels, 299) - 128) / 128
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        return self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x))))

    def _pool(self, grid: Tensor) -> Tensor:
        x = self.Mixed_7a(self.Mixed_6e(grid))
        return self.Mixed_7c(self.Mixed_7b(x)).mean((2, 3))


def without_bias(state: dict[str, Tensor], path: object) -> dict[str, Tensor]:
    """The weights without the classifier's bias, once they show that they are those of the FID network.

    Raises:
        ValueError: the classifier has not 1008 outputs, or there is an auxiliary one: torchvision's ImageNet weights.
    """
    outputs = state["fc.weight"].shape[0] if "fc.weight" in state else 0
    auxiliary = any(name.startswith("AuxLogits.") for name in state)
    if outputs != FIDInception.num_classes or auxiliary:
        found = f"a classifier of {outputs} outputs{' and an auxiliary one' if auxiliary else ''}"
        raise ValueError(
            f"{path}: {found}, while the FID network has one of 1008: torchvision's ImageNet "
            "weights give other features and no FID; use pt_inception-2015-12-05-6726825d.pth"
        )
    return {name: value for name, value in state.items() if name != "fc.bias"}
