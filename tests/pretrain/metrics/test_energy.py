import pytest

from pretrain.metrics import energy


def test_llama3_8b_hours_become_its_published_energy_and_carbon():
    kwh = energy.energy_kwh(1.3e6, watts=700)
    assert kwh == pytest.approx(910e3)
    assert energy.co2e_kg(kwh, grid_kg_per_kwh=0.43) == pytest.approx(390e3, rel=5e-3)


def test_hours_follow_from_flops_and_a_share_of_the_peak():
    hours = energy.gpu_hours(7.23e23, mfu=154.4 / 989.4, peak_flops=989.4e12)
    assert hours == pytest.approx(1.3e6, rel=1e-3)
