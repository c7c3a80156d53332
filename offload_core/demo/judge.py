"""Read a demo picture back: which background, which colour, which shape.

A template match, no learned part: ring of border pixels for the background, nearest palette colours for the shape's
pixels, and the best overlap with the four antialiased shapes fitted in place and size. Anything unclear (a blurred
outline, something between a circle and a square) is ``None`` and counts as wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offload_core.demo.scenes import COLOURS, PALETTE, PIXELS, SHAPES, Scene, coverage

#: A colour further than this from every palette entry (Euclidean, 0 to 255 sRGB) has no name.
MAX_COLOUR_DISTANCE = 70.0
#: The outline may lie this far from the template's, in pixels on average. A bound on the overlap itself would be
#: strict with small shapes and lax with large ones: half a pixel costs a small star 0.17 of it, a large circle 0.05.
MAX_OUTLINE_ERROR = 1.0
#: The least by which the overlap (IoU) with the best template must exceed that with any other shape.
MIN_MARGIN = 0.05
#: The least part of the border, and of the shape's pixels, that must agree on one colour.
MIN_AGREEMENT = 0.75

_RGB = np.array([PALETTE[c] for c in COLOURS], dtype=np.float64)


@dataclass(frozen=True)
class Verdict:
    """What a picture shows, and how well the best template fits it.

    ``overlap`` is the soft intersection over union with that template, ``margin`` how much more that is than with any
    other shape; ``outline_error`` (mean distance of the outlines), centre and radius are in pixels.
    """

    background: str | None = None
    colour: str | None = None
    shape: str | None = None
    overlap: float = 0.0
    margin: float = 0.0
    outline_error: float = float("inf")
    x: float = 0.0
    y: float = 0.0
    radius: float = 0.0

    def shows(self, scene: Scene) -> bool:
        """Whether background, colour and shape are those of the scene (size and place are not asked)."""
        return (self.colour, self.shape, self.background) == scene.combination


def judge(picture: np.ndarray) -> Verdict:
    """The verdict on one uint8 ``(64, 64, 3)`` picture."""
    if picture.shape != (PIXELS, PIXELS, 3):
        raise ValueError(f"the judge reads ({PIXELS}, {PIXELS}, 3) pictures, not {picture.shape}")
    pixels = picture.astype(np.float64)
    border = _border(pixels)
    background = _common_colour(border)
    if background is None:
        return Verdict()
    inside = _nearest(pixels) != background
    if inside.sum() < 30:
        return Verdict(background=COLOURS[background])
    core = _core(pixels, inside)
    colour = _common_colour(core)
    if colour is None or colour == background:
        return Verdict(background=COLOURS[background])
    # Between the picture's own two tones: a tint in blue beside purple is no matter of the outline.
    ground, ink = np.median(border, axis=0), np.median(core, axis=0)
    alpha = np.clip((pixels - ground) @ (ink - ground) / ((ink - ground) @ (ink - ground)), 0.0, 1.0)
    likely = sorted((_first_fit(shape, alpha) for shape in SHAPES), key=_by_overlap)[-2:]
    second, best = sorted((_refine(fit, alpha) for fit in likely), key=_by_overlap)
    margin, error = best.overlap - second.overlap, best.outline_error(alpha)
    named = best.shape if error <= MAX_OUTLINE_ERROR and margin >= MIN_MARGIN else None
    return Verdict(
        COLOURS[background], COLOURS[colour], named, best.overlap, margin, error, best.x, best.y, best.radius
    )


def accuracy(pictures: np.ndarray, scenes: list[Scene]) -> float:
    """The part (0 to 1) of the pictures ``(n, 64, 64, 3)`` that show background, colour and shape of their scene."""
    return float(np.mean([judge(p).shows(s) for p, s in zip(pictures, scenes, strict=True)]))


def _border(pixels: np.ndarray) -> np.ndarray:
    """The two outermost rows and columns as ``(n, 3)``."""
    ring = np.ones(pixels.shape[:2], dtype=bool)
    ring[2:-2, 2:-2] = False
    return pixels[ring]


def _core(pixels: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Pixels ``(n, 3)`` whose four neighbours are in the shape too: those free of antialiasing."""
    core = inside.copy()
    for axis, step in ((0, 1), (0, -1), (1, 1), (1, -1)):
        core &= np.roll(inside, step, axis)
    return pixels[core] if core.any() else pixels[inside]


def _nearest(pixels: np.ndarray) -> np.ndarray:
    """Index of the nearest palette colour, ``(..., 3)`` to ``(...)``."""
    return np.argmin(((pixels[..., None, :] - _RGB) ** 2).sum(-1), axis=-1)


def _common_colour(pixels: np.ndarray) -> int | None:
    """Palette index most of the pixels ``(n, 3)`` agree on, or None if they disagree or are far from its colour."""
    votes = np.bincount(_nearest(pixels), minlength=len(COLOURS))
    winner = int(votes.argmax())
    far = np.linalg.norm(np.median(pixels, axis=0) - _RGB[winner]) > MAX_COLOUR_DISTANCE
    return None if far or votes[winner] < MIN_AGREEMENT * len(pixels) else winner


@dataclass(frozen=True)
class _Fit:
    """A template laid over a coverage map; centre and radius in pixels."""

    shape: str
    overlap: float
    x: float
    y: float
    radius: float

    def outline_error(self, alpha: np.ndarray) -> float:
        """Area that differs per pixel of outline: the mean distance of the outlines, in pixels."""
        template = coverage(self.shape, self.x, self.y, self.radius)
        outline = np.count_nonzero((template > 0.02) & (template < 0.98))
        return float(np.abs(template - alpha).sum() / max(outline, 1))


def _first_fit(shape: str, alpha: np.ndarray) -> _Fit:
    """A template where the map's centroid and area say it should be."""
    axis = np.arange(PIXELS) + 0.5
    area = alpha.sum()
    unit = coverage(shape, PIXELS / 2, PIXELS / 2, 12.0)
    # A template's centroid is not its centre: subtract where it lies at radius 12, scaled.
    radius = 12.0 * float(np.sqrt(area / unit.sum()))
    drop = float((unit.sum(1) @ axis) / unit.sum() - PIXELS / 2) / 12.0
    x = float(alpha.sum(0) @ axis / area)
    y = float(alpha.sum(1) @ axis / area) - drop * radius
    return _Fit(shape, _overlap(coverage(shape, x, y, radius), alpha), x, y, radius)


def _refine(best: _Fit, alpha: np.ndarray) -> _Fit:
    """Move and scale a template to its best overlap, in shrinking steps."""
    for step in (1.5, 0.75, 0.4):
        for dx, dy, dr in ((step, 0, 0), (-step, 0, 0), (0, step, 0), (0, -step, 0), (0, 0, step), (0, 0, -step)):
            x, y, radius = best.x + dx, best.y + dy, max(best.radius + dr, 1.0)
            overlap = _overlap(coverage(best.shape, x, y, radius), alpha)
            if overlap > best.overlap:
                best = _Fit(best.shape, overlap, x, y, radius)
    return best


def _by_overlap(fit: _Fit) -> float:
    return fit.overlap


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.minimum(a, b).sum() / max(np.maximum(a, b).sum(), 1e-9))
