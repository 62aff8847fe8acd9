"""Draw the loss curve of a training run.

python plot.py work/run/log.jsonl loss.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def smoothed(values: list[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average without the bias towards its start."""
    average, total, result = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + 1 - weight
        result.append(average / total)
    return result


def series(lines: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    """Minutes and values of one logged quantity."""
    found = [line for line in lines if key in line]
    return [line["seconds"] / 60 for line in found], [line[key] for line in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.log.read_text().splitlines()]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    minutes, losses = series(lines, "loss")
    left.plot(minutes, losses, color="0.8", linewidth=0.8)
    left.plot(minutes, smoothed(losses), color="tab:blue")
    left.set(title="Training loss", xlabel="minutes", ylabel="nats per token", ylim=(min(losses) - 0.1, 5.5))
    minutes, bits = series(lines, "heldout_bpb_estimate")
    right.plot(minutes, bits, marker=".", color="tab:orange", label="part of the play, during training")
    minutes, bits = series(lines, "heldout_bpb")
    if bits:
        right.plot(
            minutes, bits, marker="*", markersize=10, linestyle="", color="tab:red", label="whole play, stored weights"
        )
    right.set(title="Held-out play", xlabel="minutes", ylabel="bits per byte")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(args.picture, dpi=110)


if __name__ == "__main__":
    main()
