"""Every limit of an admission that the order does not set."""

from __future__ import annotations

from dataclasses import dataclass

from ..training.loop import REPORTS

MIB = 2**20


@dataclass(frozen=True)
class AdmissionThresholds:
    """Errors are ratios to the error of a Gaussian fitted to the cluster, on the same samples, times and noise.

    The order sets the largest ratio of the mean, `acceptance.max_ratio_to_gaussian`.
    """

    # files
    card_bytes: int = 16 * MIB
    metrics_bytes: int = 4 * MIB
    metrics_lines: int = 64 * REPORTS
    header_bytes: int = 2 * MIB  # of the weights' file, beyond the weights
    text_length: int = 400  # characters of a contributor's own origin and license
    contributions: int = 8  # of one sender in an inbox that are checked, those in quarantine included
    # errors
    band: float = 3.0  # of a band of t, as a multiple of the mean's limit
    outside: float = 10.0  # outside the cluster, of which nothing was learned, as a multiple of the mean's limit
    # another cluster's expert. Trained apart, velocities differed by 0.11 to 0.86 of the error; disturbed by 1 %, by
    # at most 0.005
    difference: float = 0.02  # least squared difference from a neighbor's velocity, as a ratio to its error
    undertrained: float = 0.7  # above this error an expert is like its neighbor because neither has learned much
    neighbor_ratio: float = 0.55  # error in the neighbor's cluster as a ratio to that in its own
    neighbor_as_good: float = 1.1  # error in the neighbor's cluster as a ratio to the neighbor's
    neighbor_better: float = 0.97  # error in its own cluster as a ratio to the neighbor's
    # samples
    sample_distance: float = 1.25  # distance of samples to the data, as a ratio to that without the expert
    # which expert is active
    margin: float = 0.01  # by which a newcomer must be better than the active expert
    margin_without: float = 0.1  # by which it may then be worse without the condition
