"""A waveform as a picture. Import this only to draw: it brings matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import _charts as charts

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

WIDTH, HEIGHT = 896, 320  # pixels


def waveform_picture(waveform: torch.Tensor, rate: int) -> Image:
    """A sound over its seconds as an RGB picture of 896 x 320 pixels, a panel for each channel.

    waveform: (channels, samples). rate: samples a second. The panels reach from -1 to 1, further if the sound does.
    """
    values = waveform.float().cpu().numpy()
    loudest = max(1.0, float(np.abs(values).max(initial=0.0)))
    lasting = values.shape[1] / rate
    figure = charts.new_figure(WIDTH, HEIGHT)
    panels = figure.subplots(len(values), 1, squeeze=False, gridspec_kw={"hspace": 0.12})[:, 0]
    figure.subplots_adjust(left=0.055, right=0.985, top=0.97, bottom=0.14)
    for axes, channel in zip(panels, values, strict=True):
        charts.plain_axes(axes)
        low, high = envelope(channel, WIDTH)
        seconds = np.linspace(0, lasting, len(low))
        axes.fill_between(seconds, low, high, color=charts.BLUE, linewidth=0.8, edgecolor=charts.BLUE)
        axes.set_xlim(0, max(lasting, 1 / rate))
        axes.set_ylim(-loudest, loudest)
        axes.set_yticks([-1, 0, 1])
        axes.tick_params(labelbottom=axes is panels[-1])
    charts.time_axis(panels[-1], 0, max(lasting, 1 / rate), 0.93 * WIDTH)
    return charts.as_image(figure)


def envelope(channel: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest value of each of so many equal stretches of the samples, or of each sample if there are
    fewer."""
    if not len(channel):
        return np.zeros(1), np.zeros(1)
    starts = np.unique(np.linspace(0, len(channel), columns, endpoint=False).astype(int))
    return np.minimum.reduceat(channel, starts), np.maximum.reduceat(channel, starts)
