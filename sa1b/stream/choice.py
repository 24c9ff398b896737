"""Which masks of an image a visit takes: at most K of those that are usable, by strategy.

Every draw is a function of (seed, image id, epoch, mask index): the same on any rank, worker or thread.

    uniform     each usable mask is equally likely
    area        one mask of each of K equally large classes of area: small and large ones alike
    quality     in proportion to predicted_iou * stability_score
    coverage    a permutation for each cycle of ceil(M / K) epochs, cut into visits: after a cycle every mask
                was seen, and none stands twice in a visit
"""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from sa1b.hashing import Purpose, below, permutation, random_words, uniforms
from sa1b.shards.annotation import Annotations

Strategy = Literal["uniform", "area", "quality", "coverage"]
STRATEGIES = get_args(Strategy)

Indices = npt.NDArray[np.int64]


def choose(
    annotations: Annotations,
    usable: npt.NDArray[np.bool_],
    limit: int,
    strategy: Strategy,
    seed: int,
    epoch: int,
) -> Indices:
    """Indices of the chosen masks, int64, ascending; all usable ones if they are no more than `limit`."""
    candidates = np.flatnonzero(usable)
    image_id = annotations.image_id
    if len(candidates) <= limit:
        return candidates
    if strategy == "coverage":
        picked = _coverage(len(candidates), limit, seed, image_id, epoch)
    elif strategy == "area":
        picked = _one_of_each(annotations.area[candidates], limit, seed, image_id, epoch)
    else:
        chance = uniforms(seed, Purpose.MASKS, image_id, epoch, candidates)
        if strategy == "quality":
            scores = annotations.predicted_iou[candidates] * annotations.stability_score[candidates]
            # An exponential race: the first K arrivals are a draw without replacement by weight.
            chance = -np.log(chance) / np.maximum(np.nan_to_num(scores), 1e-6)
        picked = np.argsort(chance, kind="stable")[:limit]
    return np.sort(candidates[picked])


def _coverage(count: int, limit: int, seed: int, image_id: int, epoch: int) -> Indices:
    cycle, visit = divmod(epoch, -(-count // limit))
    order = permutation(count, seed, Purpose.COVERAGE, image_id, cycle)
    return order[(visit * limit + np.arange(limit)) % count]


def _one_of_each(area: npt.NDArray[np.int64], limit: int, seed: int, image_id: int, epoch: int) -> Indices:
    order = np.argsort(area, kind="stable")
    edges = np.arange(limit + 1) * len(order) // limit
    drawn = random_words(seed, Purpose.MASKS, image_id, epoch, np.arange(limit))
    picked: Indices = order[edges[:-1] + below(drawn, np.diff(edges))]
    return picked
