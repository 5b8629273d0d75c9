"""Do 90 % intervals hold the truth nine times in ten? The claim of docs/scaling.md, measured."""

import numpy as np
import pytest

from pretrain.scaling.fit import fit_law, interval

NAMES = ("log_E", "log_A", "log_B", "alpha", "beta")


def coverage(grid, true_law, *, noise: float, simulations: int, draws: int) -> dict[str, float]:
    hits = {name: 0 for name in (*NAMES, "optimal_exponent", "loss")}
    for k in range(simulations):
        fit = fit_law(grid(noise=noise, seed=1000 + k), bootstrap=draws, seed=k)
        pairs = {name: (true_law.column(name), fit.replicates.column(name)) for name in NAMES}
        pairs["optimal_exponent"] = (true_law.optimal_exponent, fit.replicates.optimal_exponent)
        pairs["loss"] = (true_law.loss(7e10, 1.4e12), fit.replicates.loss(7e10, 1.4e12))
        for name, (true, values) in pairs.items():
            low, high = interval(values)
            hits[name] += low <= true[0] <= high
    return {name: count / simulations for name, count in hits.items()}


def test_intervals_cover_a_law_about_nine_times_in_ten(grid, true_law):
    found = coverage(grid, true_law, noise=0.003, simulations=40, draws=200)
    assert 0.82 <= np.mean(list(found.values())) <= 0.97, found


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0005, 0.005])
def test_intervals_cover_a_law_in_85_to_95_percent_of_200_simulations(grid, true_law, noise):
    found = coverage(grid, true_law, noise=noise, simulations=200, draws=300)
    assert all(0.85 <= share <= 0.95 for share in found.values()), found
