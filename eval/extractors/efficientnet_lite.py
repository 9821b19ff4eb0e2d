"""EfficientNet-Lite0 (Google, 2020), trained on ImageNet-1k: 1280 pooled features. It is not the FID network."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eval.extractors.observation import Observation
from eval.extractors.resize import bicubic

# (expansion, output channels, blocks, stride of the first block, kernel) of each stage
STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


class SameConv2d(nn.Conv2d):
    """A bias-free convolution with TensorFlow's "SAME" padding, where the odd pixel goes below and to the right."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to [N, outputs, ceil(H / stride), ceil(W / stride)]."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        rows, columns = (max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in x.shape[2:])
        x = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
        return super().forward(x)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class MBConv(nn.Module):
    """Inverted residual without squeeze-and-excitation. The attributes bear the names of the published weights."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int):
        super().__init__()
        inner = inputs * expansion
        self.expands = expansion > 1
        self.residual = stride == 1 and inputs == outputs
        if self.expands:
            self._expand_conv = SameConv2d(inputs, inner, 1)
            self._bn0 = _norm(inner)
        self._depthwise_conv = SameConv2d(inner, inner, kernel, stride, groups=inner)
        self._bn1 = _norm(inner)
        self._project_conv = SameConv2d(inner, outputs, 1)
        self._bn2 = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] to [N, outputs, ceil(H / stride), ceil(W / stride)]."""
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    """Images of any size are resized to ``resolution`` by bicubic; 128 suits a CPU, 224 is what it was trained on."""

    num_features = 1280
    num_classes = 1000

    def __init__(self, resolution: int):
        super().__init__()
        self.resolution = resolution
        self.image_shape = (3, None, None)
        self.resize = f"bicubic-antialias-{resolution}"
        self._conv_stem = SameConv2d(3, 32, 3, stride=2)
        self._bn0 = _norm(32)
        self._blocks = nn.ModuleList()
        channels = 32
        for expansion, outputs, count, first_stride, kernel in STAGES:
            for stride in (first_stride, *[1] * (count - 1)):
                self._blocks.append(MBConv(channels, outputs, expansion, kernel, stride))
                channels = outputs
        self._conv_head = SameConv2d(channels, self.num_features, 1)
        self._bn1 = _norm(self.num_features)
        self._fc = nn.Linear(self.num_features, self.num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features [N, 1280] of fp32 pixels [N, 3, H, W] in 0..255."""
        x = (bicubic(pixels, self.resolution) - 127) / 128
        x = x.contiguous(memory_format=torch.channels_last)  # depthwise convolutions run about twice as fast on CPU
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        return F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))

    def logits(self, pixels: Tensor) -> Tensor:
        """Scores [N, 1000] of the ImageNet-1k classes for the same pixels."""
        return self._fc(self(pixels))

    def observe(self, pixels: Tensor) -> Observation:
        """Features and class scores of the same pixels in one pass."""
        features = self(pixels)
        return Observation(features, logits=self._fc(features))
