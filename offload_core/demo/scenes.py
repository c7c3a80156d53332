"""Captions and pictures of one coloured shape on a plain background.

Everything here is a pure function of its arguments (a ``numpy`` generator where chance is wanted), so a picture can be
drawn again from its seed. About a fifth of the (colour, shape, background) combinations are *held out*: training
never draws them, and tests ask for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PIXELS = 64

#: sRGB, 0 to 255.
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "orange": (255, 140, 20),
    "yellow": (250, 220, 60),
    "green": (44, 160, 60),
    "blue": (40, 80, 220),
    "purple": (140, 60, 190),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "star")

#: Range of the nominal radius in pixels. Below about 9 px a star does not survive an 8x VAE.
SIZES: dict[str, tuple[float, float]] = {"small": (9.0, 10.5), "medium": (12.5, 14.0), "large": (16.5, 18.5)}

#: Where the shape goes, as the caption says it; "" leaves it near the middle.
PLACES: dict[str, str] = {
    "": "",
    "left": "at the left",
    "right": "at the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "centre": "in the centre",
}


@dataclass(frozen=True)
class Scene:
    """One shape on a background; all fields are words of the caption."""

    colour: str
    shape: str
    background: str
    size: str = "medium"
    place: str = ""

    @property
    def combination(self) -> tuple[str, str, str]:
        return self.colour, self.shape, self.background


def is_held_out(combination: tuple[str, str, str]) -> bool:
    """Whether a (colour, shape, background) combination is kept from training.

    The rule is a Latin pattern, so each pair of the three attributes still occurs in training.
    """
    colour, shape, background = combination
    return (COLOURS.index(colour) + SHAPES.index(shape) + COLOURS.index(background)) % 5 == 0


COMBINATIONS = tuple((c, s, b) for c in COLOURS for s in SHAPES for b in COLOURS if b != c)
HELD_OUT = tuple(c for c in COMBINATIONS if is_held_out(c))
TRAINING = tuple(c for c in COMBINATIONS if not is_held_out(c))


def sample_scene(rng: np.random.Generator, combinations: tuple[tuple[str, str, str], ...] = TRAINING) -> Scene:
    """A random scene, by default of the combinations allowed in training."""
    colour, shape, background = combinations[rng.integers(len(combinations))]
    size = str(rng.choice(list(SIZES)))
    place = str(rng.choice(list(PLACES)))
    return Scene(colour, shape, background, size, place)


def caption(scene: Scene) -> str:
    """The sentence for a scene, such as ``a small green star at the top on a white background``."""
    size = "" if scene.size == "medium" else scene.size
    first = " ".join(word for word in (size, scene.colour, scene.shape) if word)
    words = [_with_article(first), PLACES[scene.place], "on", _with_article(f"{scene.background} background")]
    return " ".join(word for word in words if word)


def parse_caption(text: str) -> Scene:
    """The scene a caption stands for. Raises ``ValueError`` if ``caption`` would not write it so."""
    subject, _, ground = text.partition(" on a")
    words = subject.split()
    try:
        scene = Scene(
            colour=next(w for w in words if w in PALETTE),
            shape=next(w for w in words if w in SHAPES),
            background=next(w for w in ground.split() if w in PALETTE),
            size=next((w for w in words if w in SIZES), "medium"),
            place=next((place for place, phrase in PLACES.items() if phrase and subject.endswith(phrase)), ""),
        )
    except StopIteration:
        raise ValueError(f"not a caption of the demo grammar: {text!r}") from None
    if caption(scene) != text:
        raise ValueError(f"not a caption of the demo grammar: {text!r} (did you mean {caption(scene)!r}?)")
    return scene


def render(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Draw a scene: uint8 ``(64, 64, 3)``. Radius and centre vary within what the caption allows."""
    radius = rng.uniform(*SIZES[scene.size])
    x, y = _centre(scene.place, _EXTENT[scene.shape] * radius, rng)
    alpha = coverage(scene.shape, x, y, radius)[..., None]
    picture = alpha * np.array(PALETTE[scene.colour]) + (1 - alpha) * np.array(PALETTE[scene.background])
    return np.round(picture).astype(np.uint8)


def coverage(shape: str, x: float, y: float, radius: float) -> np.ndarray:
    """How much of each pixel the shape covers: float ``(64, 64)`` in 0 to 1, antialiased. ``x``, ``y`` in pixels."""
    axis = np.arange(PIXELS) + 0.5
    dx, dy = np.meshgrid((axis - x) / radius, (axis - y) / radius)
    return np.clip(0.5 - _DISTANCE[shape](dx, dy) * radius, 0.0, 1.0)


def _with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def _centre(place: str, extent: float, rng: np.random.Generator) -> tuple[float, float]:
    """Centre of the shape in pixels. ``extent`` is half of its bounding box."""
    middle = PIXELS / 2
    if place in ("", "centre"):
        jitter = 3.0 if place == "" else 1.0
        return middle + rng.uniform(-jitter, jitter), middle + rng.uniform(-jitter, jitter)
    near = extent + rng.uniform(2.0, 4.0)
    along = middle + rng.uniform(-2.0, 2.0)
    return {
        "left": (near, along),
        "right": (PIXELS - near, along),
        "top": (along, near),
        "bottom": (along, PIXELS - near),
    }[place]


# Signed distances of the shapes of radius 1 around the origin (negative inside), y pointing down.


def _circle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.hypot(x, y) - 1.0


def _square(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(x), np.abs(y)) - 0.9


def _polygon(corners: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Exact signed distance to a polygon with corners ``(n, 2)``, after Inigo Quilez's ``sdPolygon``."""

    def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        nearest = np.full(x.shape, np.inf)
        sign = np.ones(x.shape)
        for (ax, ay), (bx, by) in zip(corners, np.roll(corners, 1, axis=0), strict=True):
            ex, ey, px, py = bx - ax, by - ay, x - ax, y - ay
            t = np.clip((px * ex + py * ey) / (ex * ex + ey * ey), 0.0, 1.0)
            nearest = np.minimum(nearest, (px - t * ex) ** 2 + (py - t * ey) ** 2)
            above, below, left = y >= ay, y < by, ex * py > ey * px
            crosses = (above & below & left) | (~above & ~below & ~left)
            sign = np.where(crosses, -sign, sign)
        return sign * np.sqrt(nearest)

    return distance


def _ring(radii: tuple[float, ...], corners: int, down: float) -> np.ndarray:
    """``corners`` points around the origin from the top, radii taken in turn, the whole moved ``down``."""
    angle = 2 * np.pi * np.arange(corners) / corners - np.pi / 2
    radius = np.resize(np.array(radii), corners)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle) + down], axis=1)


_DISTANCE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _polygon(_ring((1.28,), 3, down=0.32)),
    "star": _polygon(_ring((1.26, 0.58), 10, down=0.12)),
}

#: Half of the bounding box at radius 1, the longer side.
_EXTENT = {"circle": 1.0, "square": 0.9, "triangle": 1.11, "star": 1.2}
