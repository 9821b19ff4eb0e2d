"""Small in-domain classifiers whose last hidden layer is the feature vector.

ImageNet features say little about 8- or 28-pixel grey images; a classifier trained on the data itself does better.
scripts/train_classifier.py trains them, on the training split alone.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from eval.extractors.observation import Observation


class SmallClassifier(nn.Module):
    """Stages of two 3x3 convolutions and a 2x2 max-pool, then one hidden layer and a linear head.

    Without normalisation layers, so it computes the same in training and in evaluation mode.
    """

    resize = "none"

    def __init__(self, image_size: int, widths: tuple[int, ...], num_features: int = 64, num_classes: int = 10):
        super().__init__()
        self.image_shape = (1, image_size, image_size)
        self.num_features = num_features
        self.num_classes = num_classes
        inputs = (1, *widths[:-1])
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, width, 3, padding=1)
            for before, width in zip(inputs, widths, strict=True)
            for channels in (before, width)
        )
        side = image_size >> len(widths)
        self.hidden = nn.Linear(widths[-1] * side * side, num_features)
        self.head = nn.Linear(num_features, num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features [N, num_features] of fp32 pixels [N, 1, image_size, image_size] in 0..255."""
        x = pixels / 127.5 - 1
        for number, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(x))
            if number % 2:
                x = F.max_pool2d(x, 2)
        return F.relu(self.hidden(x.flatten(1)))

    def logits(self, pixels: Tensor) -> Tensor:
        """Class scores [N, num_classes] of the same pixels."""
        return self.head(self(pixels))

    def observe(self, pixels: Tensor) -> Observation:
        """Features and class scores of the same pixels in one pass."""
        features = self(pixels)
        return Observation(features, logits=self.head(features))


def digits_cnn() -> SmallClassifier:
    """The architecture of ``digits-cnn``: 8x8 grey images."""
    return SmallClassifier(image_size=8, widths=(32, 64))


def fashion_mnist_cnn() -> SmallClassifier:
    """The architecture of ``fashion-mnist-cnn``: 28x28 grey images."""
    return SmallClassifier(image_size=28, widths=(32, 48, 64))
